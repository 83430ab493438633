"""Validation: how long a batch and a whole loop take, and how much memory they need, from the batches that were emulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maya_core.report.analysis import Analysis
from maya_core.report.gpu_memory import trace_on
from maya_core.report.prediction import Validation
from maya_core.simulator.simulate import RankTimeline
from maya_core.trace.memory_peaks import allocated, devices_used
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EvaluationMark, EventKind


def validation(analysis: Analysis) -> list[Validation]:
    """The evaluation loops of the job. Ranks have the same ones, and the slowest of them counts."""
    traces = analysis.job.ranks
    loops = max((trace.meta.get("evaluations", []) for trace in traces.values()), key=len)
    if not loops:
        return []
    peaks = np.max([_peaks(trace_on(trace, analysis.cluster.gpu), len(loops)) for trace in traces.values()], axis=0)
    found = []
    for number, loop in enumerate(loops):
        times = _times(analysis, number)
        found.append(
            Validation(
                **loop,
                batch_s=times.batch_s if times else None,
                loop_s=times.loop_s(loop["batches"]) if times else None,
                peak_allocated_bytes=int(peaks[number]) or None,
            )
        )
    return found


@dataclass(frozen=True)
class _Times:
    """The emulated part of a loop."""

    whole_s: float
    batches_s: np.ndarray

    @property
    def batch_s(self) -> float:
        return float(self.batches_s.mean())

    def loop_s(self, batches: int | None) -> float | None:
        """The time of a loop with that many batches."""
        if batches is None:
            return None
        return self.whole_s + self.batch_s * (batches - len(self.batches_s))


def _times(analysis: Analysis, loop: int) -> _Times | None:
    """The times of a loop, when all ranks are done with each of its parts; None if it was not finished."""
    timelines = analysis.timeline.ranks if analysis.timeline is not None else {}
    rows = [_marks(analysis.job.ranks[rank], timeline, loop) for rank, timeline in timelines.items()]
    rows = [(what, done) for what, done in rows if len(what)]
    if not rows or any(list(what) != list(rows[0][0]) for what, _ in rows):
        return None
    what, done = rows[0][0], np.max([done for _, done in rows], axis=0)
    begins, ends = done[what == EvaluationMark.BATCH_BEGIN], done[what == EvaluationMark.BATCH_END]
    if not len(ends) or len(begins) != len(ends) or what[-1] != EvaluationMark.END:
        return None
    return _Times(float(done[-1] - done[0]), ends - begins)


def _marks(trace: RankTrace, timeline: RankTimeline, loop: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's marks of a loop, and when the rank is done with all that comes before each."""
    rows = trace.events[timeline.event]
    marks = np.flatnonzero((rows["kind"] == EventKind.EVALUATION) & (rows["subject"] == loop))
    return rows["a"][marks], np.maximum.accumulate(timeline.over)[marks]


def _peaks(trace: RankTrace, loops: int) -> list[int]:
    """The most memory that is allocated on a GPU of the rank during each loop."""
    found = [0] * loops
    marks = np.flatnonzero(trace.events["kind"] == EventKind.EVALUATION)
    for device in devices_used(trace):
        used = allocated(trace, device)
        for number in range(loops):
            own = marks[trace.events["subject"][marks] == number]
            if len(own):
                found[number] = max(found[number], int(used[own[0] : own[-1] + 1].max()))
    return found
