"""A Llama in plain PyTorch, sharded by FSDP2. The defaults are the shape of Llama 3 8B. Nothing in it refers to Maya:

torchrun --nproc-per-node 8 examples/train_llama_fsdp2.py             # on eight GPUs
maya run -- torchrun --nproc-per-node 8 examples/train_llama_fsdp2.py  # without GPUs
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.recompute = args.recompute
        self.embed = nn.Embedding(args.vocabulary, args.width)
        self.layers = nn.ModuleList(
            Block(args.width, args.heads, args.kv_heads, args.inner) for _ in range(args.layers)
        )
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.half = args.width // args.heads // 2

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        rates = 500_000.0 ** (-torch.arange(self.half, device=ids.device) / self.half)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recompute else layer(x, cos, sin)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1, help="sequences per GPU and step")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(args)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    samples = torch.randint(args.vocabulary, (64 * args.batch * dist.get_world_size(), args.context + 1))
    data = TensorDataset(samples)
    loader = DataLoader(data, args.batch, sampler=DistributedSampler(data), pin_memory=True)
    for (batch,) in loader:
        batch = batch.cuda(non_blocking=True)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
