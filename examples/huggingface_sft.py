"""Supervised fine-tuning of a Llama with TRL: LoRA adapters, sequences packed without padding. Nothing in it refers to Maya.

    accelerate launch --num_processes 8 examples/huggingface_sft.py                  # on eight GPUs
    maya run -- accelerate launch --num_processes 8 examples/huggingface_sft.py     # without GPUs

The model is built from its configuration, and the tokenizer and the data are generated: nothing is downloaded.
"""

import argparse
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SIZES = {
    # hidden, feed-forward, layers, heads, key-value heads: Llama 3.2 1B and 3B
    "1b": (2048, 8192, 16, 32, 8),
    "3b": (3072, 8192, 28, 24, 8),
    "tiny": (128, 256, 2, 4, 2),
}
WORDS = 31_000


def llama(size: str) -> LlamaForCausalLM:
    hidden, feed_forward, layers, heads, kv_heads = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=WORDS + 4,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([f"w{i}" for i in range(WORDS)] + special)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def conversations(count: int) -> Dataset:
    """Texts of 50 to 500 words."""
    chance = random.Random(0)

    def text() -> str:
        return " ".join(f"w{chance.randrange(WORDS)}" for _ in range(chance.randrange(50, 500)))

    return Dataset.from_dict({"text": [text() for _ in range(count)]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(SIZES), default="1b")
    parser.add_argument("--full", action="store_true", help="train all weights, not LoRA adapters")
    parser.add_argument("--batch", type=int, default=4, help="packed sequences per GPU and step")
    parser.add_argument("--length", type=int, default=2048, help="length of a packed sequence")
    parser.add_argument("--samples", type=int, default=4000)
    args = parser.parse_args()
    trainer = SFTTrainer(
        model=llama(args.size),
        args=SFTConfig(
            output_dir="sft",
            bf16=True,
            per_device_train_batch_size=args.batch,
            gradient_checkpointing=True,
            packing=True,
            max_length=args.length,
            logging_steps=10,
            learning_rate=1e-4,
            report_to="none",
        ),
        train_dataset=conversations(args.samples),
        processing_class=tokenizer(),
        peft_config=None if args.full else LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
