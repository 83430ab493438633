"""A Llama of transformers fine-tuned under DeepSpeed ZeRO-3, on generated tokens. Nothing in it refers to Maya:

deepspeed --num_gpus 8 recipes/programs/zero3.py --batch 2
"""

import argparse

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a GPU at a time")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--bucket", type=int, default=200_000_000, help="parameters of a bucket")
    parser.add_argument("--offload", choices=("none", "cpu"), default="none", help="of the optimizer")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": args.bucket,
            "stage3_prefetch_bucket_size": args.bucket // 4,
            "offload_optimizer": {"device": args.offload, "pin_memory": True},
        },
    }
    deepspeed.init_distributed()
    shape = LlamaConfig(
        hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13824, use_cache=False
    )
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    if args.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(args.steps * args.accumulate):
        tokens = torch.randint(32000, (args.batch, args.context)).to(engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


if __name__ == "__main__":
    main()
