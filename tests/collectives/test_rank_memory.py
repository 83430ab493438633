"""Ranks have the memory and launches of real CUDA torch 2.13 with the same scripts (data/oracle.csv), and keep tensors in flight as long."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accuracy.ranks import Figures, Rank, emulated
from launches import launches as launches_of

import maya_core
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind

pytestmark = pytest.mark.slow

MIB = 2**20
TABLE = Path(__file__).parent / "data/oracle.csv"
# One of each kind. The accuracy script compares all of them.
TESTED = {
    ("ddp", "default"), ("ddp", "bucket_view"), ("ddp", "bf16_hook"),
    ("fsdp2", "default"), ("fsdp2", "bf16"), ("fsdp2", "kept"), ("fsdp2", "hybrid"), ("fsdp2", "offloaded"), ("fsdp2", "checkpointed"),
    ("fsdp1", "full"), ("tensor_parallel", "sequence"), ("tensor_parallel", "with_fsdp"),
    ("collectives", "all"),
}  # fmt: skip


def rows() -> Iterator[tuple[Rank, Figures]]:
    for row in csv.DictReader(line for line in TABLE.open() if not line.startswith("#")):
        rank = Rank(row["script"], row["variant"], row["gpu"], int(row["ranks"]), int(row["rank"]))
        first = int(row["first_allocated"]), int(row["first_reserved"])
        yield rank, Figures(first, (int(row["allocated"]), int(row["reserved"])), int(row["launches"]))


def is_tested(rank: Rank) -> bool:
    uneven = (rank.ranks, rank.rank) == (7, 6)
    return uneven or (
        rank.gpu == "h100" and rank.ranks == 8 and not rank.rank and (rank.script, rank.variant) in TESTED
    )


@pytest.mark.parametrize(
    ("rank", "expected"),
    [pytest.param(r, f, id=f"{r.script}-{r.variant}-{r.rank}-of-{r.ranks}") for r, f in rows() if is_tested(r)],
)
def test_a_rank_is_what_cuda_torch_does(rank: Rank, expected: Figures) -> None:
    assert emulated(rank) == expected


# ---- tensors in flight ----
@pytest.fixture
def job() -> Iterator[maya_core.emulate]:
    with maya_core.emulate("h100", gpus_per_node=8, nodes=1) as emulation:
        dist.init_process_group("nccl")
        yield emulation


def mebibytes() -> int:
    return torch.cuda.memory_allocated() // MIB


def new(size: int) -> torch.Tensor:
    return torch.empty(size * MIB // 4, device="cuda")


def launches(trace: RankTrace, kind: EventKind = EventKind.OP) -> int:
    return launches_of(trace) if kind == EventKind.OP else int(np.count_nonzero(trace.events["kind"] == kind))


def test_a_tensor_is_kept_until_its_work_is_waited_for(job: maya_core.emulate) -> None:
    output = new(16)
    work = dist.all_gather_into_tensor(output, new(2), async_op=True)
    assert mebibytes() == 18
    dist.all_reduce(new(4))  # other calls do not change that
    assert mebibytes() == 18
    work.wait()
    assert mebibytes() == 16


def test_a_tensor_whose_work_was_dropped_is_kept_until_the_next_call(job: maya_core.emulate) -> None:
    dist.all_reduce(new(4), async_op=True)
    assert mebibytes() == 4
    kept = dist.all_reduce(new(2), async_op=True)
    assert mebibytes() == 2
    kept.wait()
    assert mebibytes() == 2  # a work's result is its own
    del kept
    assert mebibytes() == 0


def test_a_blocking_call_keeps_nothing(job: maya_core.emulate) -> None:
    dist.all_reduce(new(4))
    dist.all_gather([new(1) for _ in range(8)], new(1))
    assert mebibytes() == 0
    assert torch.cuda.max_memory_allocated() == 17 * MIB  # the list, the tensor it goes through, and the input


def test_the_tensor_a_list_goes_through_lives_as_long_as_the_work(job: maya_core.emulate) -> None:
    pieces = [new(1) for _ in range(8)]
    work = dist.all_gather(pieces, new(1), async_op=True)
    work.wait()
    assert mebibytes() == 16
    del work
    assert mebibytes() == 8


def test_a_coalesced_list_is_let_go_of_by_the_call_after_the_group(job: maya_core.emulate) -> None:
    with dist._coalescing_manager(device=torch.device("cuda", 0), async_ops=True) as group:
        for _ in range(3):
            dist.all_reduce(new(2))
    group.wait()
    assert mebibytes() == 6  # the work of the group holds no tensors
    dist.all_reduce(new(1))
    assert mebibytes() == 0


def test_a_message_is_kept_by_its_stream(job: maya_core.emulate) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, new(4), 1), dist.P2POp(dist.irecv, new(4), 1)]):
        work.wait()
    del work
    assert mebibytes() == 0


def test_the_root_copies_its_own_part() -> None:
    with maya_core.emulate("h100", gpus_per_node=8, nodes=1) as job:
        dist.init_process_group("nccl")
        dist.gather(new(1), [new(1) for _ in range(8)], 0)
        dist.scatter(new(1), [new(1) for _ in range(8)], 0)
    assert (launches(job.trace), launches(job.trace, EventKind.COLLECTIVE)) == (2, 2)


def test_a_group_of_one_copies_what_it_would_scatter() -> None:
    with maya_core.emulate("h100", gpus_per_node=1, nodes=1) as job:
        dist.init_process_group("nccl")
        dist.reduce_scatter_tensor(new(1), new(1))
        dist.gather(new(1), [new(1)], 0)
        dist.all_reduce(new(1))
    assert (launches(job.trace), launches(job.trace, EventKind.COLLECTIVE)) == (2, 1)
