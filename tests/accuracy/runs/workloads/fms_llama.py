"""Llama 2 pretraining as fms-fsdp ran it: FSDP or hybrid sharding of every block, bfloat16, activations of evenly spread
blocks recomputed. The measured program was compiled; compiled_kernels.py stands for what that does inside a block.
"""

import argparse
import os

import torch
import torch.distributed as dist
from compiled_kernels import add_rms_norm, rms_norm, rotary, swiglu
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_width, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        normed = rms_norm(x, self.norm1)
        q, k, v = (part(normed).view(batch, tokens, -1, self.head_width) for part in (self.q, self.k, self.v))
        q, k = rotary(q, angles), rotary(k, angles)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:  # as fms does: keys and values are spelled out before attention
            k, v = (part.unsqueeze(3).expand(-1, -1, -1, repeats, -1).flatten(2, 3) for part in (k, v))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x, normed = add_rms_norm(self.out(attended.transpose(1, 2).reshape(batch, tokens, width)), x, self.norm2)
        return x + self.down(swiglu(self.gate(normed), self.up(normed)))


class Llama(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(
            Block(args.width, args.heads, args.kv_heads, args.inner) for _ in range(args.layers)
        )
        self.norm = nn.Parameter(torch.ones(args.width))
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.angles = torch.empty(args.context, args.width // args.heads, device="cuda")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(rms_norm(x, self.norm))


def recompute_evenly(model: nn.Module, share: float) -> None:
    blocks, chosen = 0, 0

    def is_chosen(module: nn.Module) -> bool:
        nonlocal blocks, chosen
        if not isinstance(module, Block):
            return False
        blocks += 1
        take = blocks * share >= chosen + 0.5
        chosen += take
        return take

    apply_activation_checkpointing(model, check_fn=is_chosen)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "kv-heads", "inner", "vocabulary", "context", "micro-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--sharding", choices=["FSDP", "HSDP"], required=True)
    parser.add_argument("--recompute", type=float, default=0.0, help="share of the blocks")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")

    def initialize(module: nn.Module) -> None:
        module.to_empty(device="cuda", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)

    with torch.device("meta"):
        model = Llama(args)
    strategy = ShardingStrategy.FULL_SHARD if args.sharding == "FSDP" else ShardingStrategy.HYBRID_SHARD
    half = torch.bfloat16
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half),
        sharding_strategy=strategy,
        use_orig_params=True,
        device_id=torch.cuda.current_device(),
        limit_all_gathers=True,
        param_init_fn=initialize,
    )
    if args.recompute:
        recompute_evenly(sharded, args.recompute)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    while True:
        batch = torch.randint(0, args.vocabulary, (args.micro_batch, args.context + 1))
        ids, labels = batch[:, :-1].to("cuda"), batch[:, 1:].to("cuda")
        optimizer.zero_grad()
        logits = sharded(ids)
        loss = F.cross_entropy(logits.view(-1, args.vocabulary), labels.flatten())
        del logits
        loss.backward()
        sharded.clip_grad_norm_(1.0).item()
        optimizer.step()
        loss.item()


if __name__ == "__main__":
    main()
