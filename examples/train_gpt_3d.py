"""A GPT on a 3-D mesh in plain PyTorch: tensor parallel (DTensor), pipeline parallel (torch.distributed.pipelining) and
sharded data parallel (FSDP2). The defaults are the shape of GPT-3 175B. Nothing in it refers to Maya:

torchrun --nnodes 128 --nproc-per-node 8 examples/train_gpt_3d.py --tp 8 --pp 8            # on 1,024 GPUs
maya run -- torchrun --nnodes 128 --nproc-per-node 8 examples/train_gpt_3d.py --tp 8 --pp 8  # without GPUs
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape  # the heads of this rank only
        q, k, v = (
            part(x).view(batch, tokens, -1, self.head_width).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    """The layers of one pipeline stage; the first has the embedding, the last the head. Activations are split along
    the sequence between blocks, and between stages."""

    def __init__(self, args: argparse.Namespace, stage: int) -> None:
        super().__init__()
        self.recompute = args.recompute
        self.tokens = nn.Embedding(args.vocabulary, args.width) if stage == 0 else None
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers // args.pp))
        last = stage == args.pp - 1
        self.norm = nn.LayerNorm(args.width) if last else None
        self.head = nn.Linear(args.width, args.vocabulary, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x)) if self.head is not None else x


def parallelize(stage: Stage, tp, dp) -> None:
    """Sequence-parallel tensor parallelism inside the node, then sharding over the data-parallel ranks."""
    along_sequence = Shard(1)
    whole = PrepareModuleInput(input_layouts=along_sequence, desired_input_layouts=Replicate())
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= {"attention": whole, "mlp": whole, "mlp.up": ColwiseParallel()}
    plan |= {f"attention.{part}": ColwiseParallel() for part in "qkv"}
    plan |= {name: RowwiseParallel(output_layouts=along_sequence) for name in ("attention.out", "mlp.down")}
    sharding = {"mesh": dp, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for block in stage.blocks:
        parallelize_module(block, tp, plan)
        fully_shard(block, **sharding, reshard_after_forward=False)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=along_sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=along_sequence, output_layouts=Replicate()),
    }
    parallelize_module(stage, tp, {name: style for name, style in ends.items() if getattr(stage, name) is not None})
    fully_shard(stage, **sharding, reshard_after_forward=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--vocabulary", type=int, default=51200)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument(
        "--microbatches", type=int, default=16, help="microbatches of one sequence, per step and data-parallel rank"
    )
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    replicas = dist.get_world_size() // (args.tp * args.pp)
    mesh = init_device_mesh("cuda", (args.pp, replicas, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    place = mesh["pp"].get_local_rank()

    with torch.device("meta"):
        module = Stage(args, place)
    parallelize(module, mesh["tp"], mesh["dp"])
    module.to_empty(device="cuda")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.006)
    optimizer = torch.optim.AdamW(module.parameters(), lr=6e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    stage = PipelineStage(module, place, args.pp, torch.device("cuda"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss)
    for step in range(args.steps):
        batch = torch.randint(0, args.vocabulary, (args.microbatches, args.context + 1), device="cuda")
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(batch[:, :-1])
        elif place == args.pp - 1:
            schedule.step(target=batch[:, 1:], losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        if losses and dist.get_rank() % args.tp == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
