"""The exact collectives of one step, derived by hand from the model's dimensions: op, bytes, group and stream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import maya_core
from maya_core.trace.job import read_job
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")
ALL = tuple(range(8))


class Seen(NamedTuple):
    op: str
    given: int  # bytes
    taken: int
    ranks: tuple[int, ...]
    stream: int  # c10's stream id; 0 is the default stream


def collectives(trace: RankTrace, step: int) -> list[Seen]:
    seen = []
    for event in trace.step(step):
        if event["kind"] == EventKind.COLLECTIVE:
            call = trace.collectives[event["subject"]]
            size = {"Float": 4, "BFloat16": 2, "Long": 8}[call.dtype]
            seen.append(
                Seen(
                    call.op,
                    call.elements_in * size,
                    call.elements_out * size,
                    trace.communicators[call.communicator].ranks,
                    trace.streams[event["stream"]][1],
                )
            )
    return seen


def own_stream(pool: int, number: int) -> int:
    """c10's id of the n-th stream taken from a pool: 0 of normal, 1 of high priority."""
    return number << 5 | (pool + 1) << 1 | 1


def test_ddp() -> None:
    width, layers = 1024, 2
    with maya_core.emulate("h100", nodes=1, gpus_per_node=8) as job:
        dist.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(16, width, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # A layer's gradients, weight and bias, are more than the first bucket's 1 MiB, so each layer fills a bucket: from
    # the second step on, when buckets follow the order in which gradients arrive.
    bucket = (width * width + width) * 4
    stream = own_stream(0, 0)  # DDP waits for futures, so it is the communicator's own stream, the first from the pool
    assert collectives(job.trace, 3) == [Seen("all_reduce", bucket, bucket, ALL, stream)] * layers
    # In the first step all layers are in one bucket, because they fit into its 25 MiB.
    assert collectives(job.trace, 1)[-1] == Seen("all_reduce", layers * bucket, layers * bucket, ALL, stream)


def test_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    width, layers = 1024, 3
    with maya_core.emulate("h100", nodes=1, gpus_per_node=8) as job:
        dist.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(16, width, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = width * width * 4
    shard = whole // 8
    # FSDP2 takes four streams of high priority: all-gather copy-in, all-gather, reduce-scatter, all-reduce.
    gather = Seen("all_gather_into_tensor", shard, whole, ALL, own_stream(1, 1))
    scatter = Seen("reduce_scatter_tensor", whole, shard, ALL, own_stream(1, 2))
    forward = [gather] * layers
    # Each layer's parameters were freed after its forward: the last layer is gathered, and while it computes, the one before.
    backward = [gather, gather, scatter, gather, scatter, scatter]
    assert collectives(job.trace, 2) == forward + backward


def test_tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    width, tokens, blocks = 512, 16, 2
    with maya_core.emulate("h100", nodes=1, gpus_per_node=8) as job:
        mesh = init_device_mesh("cuda", (8,))
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks))
        ).cuda()
        for block in model:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(tokens, width, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    activation = tokens * width * 4
    reduce = Seen("all_reduce", activation, activation, ALL, own_stream(0, 0))
    # Forward: each block's output. Backward: each block's input gradient, but the first block's input has none.
    assert collectives(job.trace, 2) == [reduce] * (blocks + blocks - 1)


PIPELINE = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
module = nn.Linear(256, 256, bias=False).cuda()
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
schedule = Schedule1F1B(PipelineStage(module, rank, stages, torch.device("cuda", rank)), 8, loss_fn=nn.functional.mse_loss)
for _ in range(3):
    batch = torch.randn(16, 256, device="cuda")
    schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == stages - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "train.py").write_text(PIPELINE)
    command = [MAYA, "run", "--", "torchrun", "--nproc-per-node", "4", "train.py"]
    done = subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "maya-out"


def test_1f1b(pipeline: Path) -> None:
    stages, microbatches = 4, 8
    message = 16 // microbatches * 256 * 4  # two rows each
    job = read_job(pipeline)
    assert list(job.ranks) == [0, 1, 2, 3]  # rank 0's messages lead to rank 1, and so on to the last
    for stage in range(stages - 1):
        # One forward, one backward: a stage runs ahead by as many microbatches as there are stages from it to the end.
        # A message in one direction only uses a communicator of the two ranks; where an activation is sent while a gradient is
        # received, both messages are one launch on the group's communicator.
        ahead = stages - stage
        pair, everyone = (stage, stage + 1), (0, 1, 2, 3)
        expected = [("send", message, pair)] * (ahead - 1)
        expected += [("send", message, everyone), ("recv", message, everyone)] * (microbatches - ahead + 1)
        expected += [("recv", message, pair)] * (ahead - 1)
        assert _with(job.ranks[stage], 3, stage + 1) == expected
    for stage, trace in job.ranks.items():
        streams: dict[tuple[int, ...], set[int]] = {}
        for one in collectives(trace, 3):
            streams.setdefault(one.ranks, set()).add(one.stream)
        assert all(len(used) == 1 for used in streams.values()), stage  # one stream for each communicator
        assert len(set.union(*streams.values()) | {0}) == len(streams) + 1


def _with(trace: RankTrace, step: int, peer: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """Messages to and from a rank: op, bytes, and the ranks of the communicator."""
    found = []
    for event in trace.step(step):
        if event["kind"] == EventKind.COLLECTIVE:
            call = trace.collectives[event["subject"]]
            ranks = trace.communicators[call.communicator].ranks
            if ranks[call.peer] == peer:
                found.append((call.op, 4 * call.elements_in, ranks))
    return found


def test_every_message_of_the_pipeline_is_matched(pipeline: Path) -> None:
    job = read_job(pipeline)
    messages = [meet for meet in job.rendezvous if meet.messages]
    assert {meet.members for meet in messages} == {(a, b) for a in range(4) for b in (a - 1, a + 1) if 0 <= b < 4}
    assert all(meet.complete == len(meet.events) for meet in messages)
    between = sum(len(meet.events) for meet in messages if meet.members == (0, 1))
    assert between >= 24  # 8 microbatches in each of 3 steps, and the shapes that stages exchange at first
