"""A Llama in plain PyTorch: FSDP2 over nodes, tensor parallel within them, on generated tokens. Nothing in it refers to Maya:

torchrun --nnodes 8 --nproc-per-node 8 recipes/programs/llama.py --model 70b --tp 8
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# layers, width, heads, heads of keys and values, inner width
MODELS = {"8b": (32, 4096, 32, 8, 14336), "70b": (80, 8192, 64, 8, 28672)}
VOCABULARY = 128256


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part(x).view(batch, tokens, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (rotate(part, cos, sin) for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads, kv_heads), MLP(width, inner)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, inner: int, recompute: bool) -> None:
        super().__init__()
        self.recompute, self.half = recompute, width // heads // 2
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        rates = 500_000.0 ** (-torch.arange(self.half, device=ids.device) / self.half)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recompute else layer(x, cos, sin)
        return self.head(self.norm(x))


def split(model: Llama, mesh) -> None:
    """Tensor and sequence parallel: heads and inner width over the GPUs, tokens between blocks too."""
    outside = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outside)
    for block in model.layers:
        plan = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a replica at a time")
    parser.add_argument("--accumulate", type=int, default=1, help="times that in a step")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--reshard", action=argparse.BooleanOptionalAction, default=True, help="parameters after forward"
    )
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    shards = dist.get_world_size() // args.tp
    mesh = init_device_mesh("cuda", (shards, args.tp), mesh_dim_names=("shard", "tensor"))
    with torch.device("meta"):
        model = Llama(*MODELS[args.model], recompute=args.recompute)
    if args.tp > 1:
        split(model, mesh["tensor"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=args.reshard)
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(args.steps):
        for micro in range(args.accumulate):
            model.set_requires_gradient_sync(micro + 1 == args.accumulate)
            ids = torch.randint(VOCABULARY, (args.batch, args.context + 1)).pin_memory().cuda(non_blocking=True)
            logits = model(ids[:, :-1])
            with loss_parallel() if args.tp > 1 else contextlib.nullcontext():  # the vocabulary stays split
                loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / args.accumulate
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
