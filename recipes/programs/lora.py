"""LoRA on a Llama of transformers, on one GPU, with Hugging Face's Trainer and generated tokens. Nothing in it refers to Maya:

python recipes/programs/lora.py --batch 4
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self, tokens: int) -> None:
        self.sample = torch.randint(32000, (tokens,))

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, _: int) -> dict:
        return {"input_ids": self.sample, "labels": self.sample}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_config(LlamaConfig(), dtype=torch.bfloat16)  # the shape of Llama 2 7B
    model.config.use_cache = False
    if args.recompute:
        model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulate,
            gradient_checkpointing=args.recompute,
            bf16=True,
            report_to=[],
            save_strategy="no",
        )
        Trainer(model, arguments, train_dataset=Tokens(args.context)).train()


if __name__ == "__main__":
    main()
