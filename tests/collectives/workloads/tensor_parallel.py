"""Tensor parallel with DTensor: tensor_parallel.py VARIANT"""

import sys

import torch
from gpt import GPT, loss_of, report, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

variant = sys.argv[1]
start()
if variant == "with_fsdp":
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("shards", "tensor"))
    tensor = mesh["tensor"]
else:
    tensor = init_device_mesh("cuda", (8,), mesh_dim_names=("tensor",))
with torch.device("cuda"):
    model = GPT()
if variant == "sequence":
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    of_block = {
        "norm1": SequenceParallel(),
        "query": ColwiseParallel(input_layouts=Shard(1)),
        "key": ColwiseParallel(input_layouts=Shard(1)),
        "value": ColwiseParallel(input_layouts=Shard(1)),
        "out": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
else:
    plan = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    of_block = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    of_block |= {name: RowwiseParallel() for name in ("out", "down")}
parallelize_module(model, tensor, plan)
for block in model.blocks:
    parallelize_module(block, tensor, of_block)
    if variant == "with_fsdp":
        fully_shard(block, mesh=mesh["shards"])
if variant == "with_fsdp":
    fully_shard(model, mesh=mesh["shards"])
# foreach takes no mixture of DTensors and other tensors
optimizer = torch.optim.AdamW(model.parameters(), foreach=variant != "plain")
for step in range(3):
    if variant == "sequence":
        with loss_parallel():
            loss_of(model).backward()
    else:
        loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    report(step)
