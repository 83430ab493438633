"""Summarizes what torch.compile did: its graphs, graph breaks, recompilations and failures, as the traces recorded them."""

from __future__ import annotations

from typing import Any

import numpy as np

from maya_core.report import wording
from maya_core.report.prediction import Compiled
from maya_core.trace.job import JobTrace
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind

MOST_NAMED = 4


def compiled(job: JobTrace) -> Compiled | None:
    traces = [trace for trace in job.ranks.values() if trace.meta.get("compiled")]
    if not traces:
        return None
    trace = max(traces, key=lambda one: one.meta["compiled"]["graphs"])
    record = trace.meta["compiled"]
    return Compiled(
        graphs=record["graphs"],
        triton_kernels_per_step=_kernels(trace),
        compile_s=record["seconds"],
        graph_breaks=[_break(one) for one in record["graph_breaks"]],
        recompiles=[_recompile(one) for one in record["recompiles"]],
        failed=[_failure(one) for one in record["failed"]],
    )


def _kernels(trace: RankTrace) -> int:
    step = trace.step(trace.steps) if trace.steps else trace.events
    triton = np.array([call.triton is not None for call in trace.calls] or [False])
    return int(np.count_nonzero(triton[step["subject"][step["kind"] == EventKind.OP]]))


def _break(row: dict[str, Any]) -> str:
    return f"{wording.short_source(row['where']) or 'unknown line'}: {row['reason']}"


def _recompile(row: dict[str, Any]) -> str:
    return f"{_function(row)}, {row['times']} time{'s' * (row['times'] != 1)}, the last time because this guard failed: {row['reason']}"


def _failure(row: dict[str, Any]) -> str:
    return f"{_function(row)}: {row['reason']}"


def _function(row: dict[str, Any]) -> str:
    """A function as 'forward (file:line)', with a short path."""
    name, _, place = row["function"].partition(" (")
    return f"{name} ({wording.short_source(place.rstrip(')'))})" if place else name


def _some(rows: list[str]) -> str:
    more = len(rows) - MOST_NAMED
    return "; ".join(rows[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def caveats(trace: RankTrace) -> list[str]:
    record = trace.meta.get("compiled")
    if not record:
        return []
    found = []
    if breaks := record["graph_breaks"]:
        found.append(
            f"torch.compile breaks its graph in {len(breaks)} place{'s' * (len(breaks) != 1)}, as it would on a GPU: {_some([_break(one) for one in breaks])}."
        )
    if again := record["recompiles"]:
        when = [step for step in record["in_steps"] if step > 1]
        steps = f", in step{'s' * (len(when) != 1)} {', '.join(map(str, when))}" if when else ""
        found.append(
            f"torch.compile recompiled{steps}: {_some([_recompile(one) for one in again])}. On a real machine each recompilation takes seconds to minutes, which no time here includes."
        )
    if failed := record["failed"]:
        found.append(
            f"torch.compile failed, as it would on a GPU, so these functions run uncompiled: {_some([_failure(one) for one in failed])}."
        )
    return found
