"""Which of several processes without a rank a run's trace describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import maya_core
from maya_core.trace.processes import write_best
from maya_core.trace.rank import RankTrace, read_trace


@pytest.fixture(scope="module")
def recorded() -> RankTrace:
    with maya_core.emulate("h100") as job:
        weight = torch.zeros(8, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
    assert job.trace is not None
    return job.trace


def trace_of(recorded: RankTrace, process: str, steps: bool = True) -> RankTrace:
    events = recorded.events if steps else recorded.events[:1]
    return replace(recorded, meta={**recorded.meta, "process": process, "notes": []}, events=events)


@pytest.mark.parametrize(
    ("first", "second", "kept", "told"),
    [
        (("child", True), ("program", False), "child", False),  # a launcher that looked at the GPU
        (("child", False), ("program", True), "program", False),  # a helper
        (("child", True), ("program", True), "program", True),
        (("program", True), ("child", True), "program", True),
        (("rank", True), ("program", False), "rank", False),
        (("program", False), ("rank", True), "rank", False),
        (("child", True), ("rank", True), "rank", True),
        (("rank", False), ("program", True), "rank", True),
        (("child", False), ("child", False), "child", True),
    ],
)
def test_what_trains_and_what_is_a_rank_counts(
    recorded: RankTrace, first: tuple[str, bool], second: tuple[str, bool], kept: str, told: bool, tmp_path: Path
) -> None:
    path = tmp_path / "rank-00000.trace"
    for process, steps in (first, second):
        write_best(path, trace_of(recorded, process, steps))
    found = read_trace(path)
    assert found.meta["process"] == kept
    assert len(found.meta["notes"]) == told


def test_of_two_children_that_train_the_first_is_kept(recorded: RankTrace, tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.trace"
    for failure in ("the first", "the second", "the third"):
        trace = trace_of(recorded, "child")
        write_best(path, replace(trace, meta={**trace.meta, "failure": failure}))
    assert read_trace(path).meta["failure"] == "the first"
    assert len(read_trace(path).meta["notes"]) == 1


def test_a_rank_that_is_emulated_again_replaces_its_trace(recorded: RankTrace, tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.trace"
    for failure in ("", "again"):
        trace = trace_of(recorded, "rank")
        write_best(path, replace(trace, meta={**trace.meta, "failure": failure}))
    assert read_trace(path).meta["failure"] == "again"
