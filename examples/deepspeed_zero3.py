"""A Llama trained from scratch with DeepSpeed's ZeRO-3, on generated tokens.

deepspeed --num_gpus 8 examples/deepspeed_zero3.py --deepspeed_config examples/deepspeed_zero3.json
deepspeed --emulate examples/deepspeed_zero3.py --deepspeed_config examples/deepspeed_zero3.json      without a GPU
"""

import argparse

import deepspeed
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


class Tokens(Dataset):
    def __init__(self, samples: int, length: int) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(32000, (self.length,), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--save", help="folder for a checkpoint every 100 steps")
    parser.add_argument("--local_rank", type=int, default=-1)  # given by the launcher
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, max_position_embeddings=args.length, **SIZES[args.size]))
    model.gradient_checkpointing_enable()

    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Tokens(args.samples, args.length)
    )
    for step, tokens in enumerate(loader, start=1):
        tokens = tokens.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if args.save and step % 100 == 0:
            engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
