"""Small jobs for tests of reports. They are emulated in this process and analysed, which takes a second or two."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

import maya_core
from maya_core.hardware.cluster import cluster
from maya_core.report.analysis import Analysis, analyse
from maya_core.report.prediction import Prediction
from maya_core.report.summary import summarize
from maya_core.request import PredictionOptions
from maya_core.trace.job import collate
from maya_core.trace.rank import RankTrace

SCRIPT = "</script><script>hacked = 1</script>"
IMAGE = "<img src=x onerror='hacked = 2'>&amp;"
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.add_module(SCRIPT, nn.Linear(width, 4 * width))
        self.add_module(IMAGE, nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.children()
        return x + second(torch.relu(first(x)))


def train(rank: int = 0, world: int = 1, width: int = 512, rows: int = 4096) -> None:
    model = nn.Sequential(*(Block(width) for _ in range(4))).cuda()
    if world > 1:
        dist.init_process_group("nccl", rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss = model(torch.randn(rows, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.item()
    if world > 1:
        dist.destroy_process_group()


@cache
def trained(world: int = 1) -> tuple[Analysis, Prediction]:
    """A few layers on one GPU, or data parallel with every rank emulated."""
    traces = []
    for rank in range(world):
        with maya_core.emulate("h100", gpus_per_node=world, nodes=1, rank=rank, steps=STEPS) as job:
            train(rank, world)
        traces.append(job.trace)
    return _analysed(traces, world)


@cache
def out_of_memory() -> tuple[Analysis, Prediction]:
    """A job whose first step asks for more than the GPU has."""
    with suppress(torch.OutOfMemoryError), maya_core.emulate("h100", gpus_per_node=1, nodes=1) as job:
        train(rows=2**23)
    return _analysed([job.trace], 1)


@cache
def hung() -> tuple[Analysis, Prediction]:
    """Two ranks that do not agree about their first collective."""
    traces = []
    for rank in range(2):
        with maya_core.emulate("h100", gpus_per_node=2, nodes=1, rank=rank) as job:
            dist.init_process_group("nccl", rank=rank, world_size=2)
            tensor = torch.ones(1024 * (rank + 1), device="cuda")
            dist.all_reduce(tensor)
        traces.append(job.trace)
    return _analysed(traces, 2)


def _analysed(traces: list[RankTrace], gpus: int) -> tuple[Analysis, Prediction]:
    analysis = analyse(collate(traces), cluster("h100", gpus), PredictionOptions(samples_per_step=4096.0 * gpus))
    return analysis, summarize(analysis)
