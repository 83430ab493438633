"""Which process of a program the prediction describes, if several have used the GPU and none says which rank it is: a launcher that only looks
at it, a test of the installation, the training, and another training after that."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from maya_core.trace.rank import RankTrace, read_trace, write_trace

SEVERAL = "Several processes of the program used the GPU, one after the other or at once. The prediction describes {which}; time and memory of the others are not in it."
_WHICH = {"rank": "the ranks of its job", "program": "the program itself", "child": "the first that trained"}


def write_best(path: Path, trace: RankTrace) -> None:
    """Writes the trace, unless that of a process that counts more is there. A rank counts most, then what trains, then the program itself."""
    with _alone(path.parent):
        if not path.exists():
            write_trace(path, trace)
            return
        other = read_trace(path)
        best, rest = (other, trace) if _weight(other) >= _weight(trace) else (trace, other)
        both_are_ranks = _kind(best) == _kind(rest) == "rank"
        if both_are_ranks:
            write_trace(path, trace)
        elif rest.steps or not best.steps:
            write_trace(path, _with_note(best))
        elif best is trace:
            write_trace(path, trace)


def _kind(trace: RankTrace) -> str:
    return str(trace.meta.get("process", "rank"))


def _weight(trace: RankTrace) -> tuple[bool, bool, bool]:
    return _kind(trace) == "rank", trace.steps > 0, _kind(trace) == "program"


def _with_note(trace: RankTrace) -> RankTrace:
    note = SEVERAL.format(which=_WHICH[_kind(trace)])
    notes: list[Any] = trace.meta["notes"]
    return trace if note in notes else replace(trace, meta={**trace.meta, "notes": [*notes, note]})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process writes into the folder meanwhile."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
