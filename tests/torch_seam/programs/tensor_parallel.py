"""A decoder whose products are split over the ranks (DTensor), with sequence parallelism, loss parallelism and a checkpoint of its shards."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY, BATCH = 2048, 16, 2, 1024, 32000, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm1(x)
        q, k, v = (each(inner).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decoder().bfloat16()
    for block in model.blocks:
        parallelize_module(block, mesh, {"norm1": SequenceParallel(), "norm2": SequenceParallel()})
        parallelize_module(
            block, mesh, {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        )
        parallelize_module(block, mesh, {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")})
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(3):
        batch = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1)).cuda()
        with loss_parallel():
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": model.state_dict()}, checkpoint_id=os.path.join(tempfile.gettempdir(), "never-written"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
