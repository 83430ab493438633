"""Prices and simulates a job. All figures and pictures of the report are derived from the resulting Analysis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from maya_core.hardware.cluster import Cluster
from maya_core.predictor.calibration import Calibration
from maya_core.predictor.pricing import Predictor, TraceDurations, durations_of
from maya_core.request import PredictionOptions
from maya_core.simulator.simulate import RankTimeline, Timeline, simulate
from maya_core.trace.hangs import find_hangs
from maya_core.trace.job import JobTrace
from maya_core.trace.schema import EventKind


@dataclass(frozen=True)
class Window:
    """The steady part of a rank's timeline, and the number of steps in it."""

    start: float
    end: float
    steps: int

    @property
    def step_s(self) -> float:
        return (self.end - self.start) / self.steps


@dataclass(frozen=True)
class Analysis:
    job: JobTrace
    cluster: Cluster
    options: PredictionOptions
    durations: dict[int, TraceDurations]
    timeline: Timeline | None  # None: the job hangs
    hangs: list[str] = field(default_factory=list)
    calibration: Calibration | None = None  # made from the user's own measurements of this GPU

    @cached_property
    def steps(self) -> int:
        """The number of steps that all emulated ranks with an optimizer completed."""
        return min((trace.steps for trace in self.job.ranks.values() if trace.steps), default=0)

    def window(self, rank: RankTimeline) -> Window | None:
        """From the end of the first step, which includes warm-up, to the end of the last; a single step counts itself."""
        ends = rank.step_ends[: self.steps]
        if not len(ends):
            return None
        if len(ends) == 1:
            return Window(0.0, float(ends[0]), 1)
        return Window(float(ends[0]), float(ends[-1]), len(ends) - 1)

    @cached_property
    def step_time_s(self) -> float | None:
        """The time of a steady step of the job: from the end of the first step of all ranks to the end of the last, per step."""
        if self.timeline is None or not self.steps:
            return None
        ends = self.timeline.step_ends[: self.steps]
        return float(ends[0]) if len(ends) == 1 else float(ends[-1] - ends[0]) / (len(ends) - 1)

    def steady_events(self, rank: int) -> tuple[slice, int]:
        """The events of a rank's steady steps, and the number of these steps."""
        ends = np.flatnonzero(self.job.ranks[rank].events["kind"] == EventKind.STEP_END)[: self.steps]
        if not len(ends):
            return slice(0, 0), 1
        if len(ends) == 1:
            return slice(0, int(ends[0]) + 1), 1
        return slice(int(ends[0]) + 1, int(ends[-1]) + 1), len(ends) - 1


def price(
    job: JobTrace,
    cluster: Cluster,
    options: PredictionOptions,
    calibration: Calibration | None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[int, TraceDurations]:
    """What every call of every rank takes on that cluster."""
    predictor = Predictor(cluster.gpu, burst=options.burst, attention=options.attention, calibration=calibration)
    durations = {}
    for number, (rank, trace) in enumerate(job.ranks.items(), 1):
        progress(f"pricing kernels, rank {number} of {len(job.ranks)}")
        durations[rank] = durations_of(trace, cluster, predictor, job.command)
    return durations


def analyse(
    job: JobTrace,
    cluster: Cluster,
    options: PredictionOptions | None = None,
    calibration: Calibration | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Analysis:
    """Prices the job for the cluster and simulates it. `progress` is called with the present activity."""
    options = options or PredictionOptions()
    progress("looking for hangs")
    hangs = [str(hang) for hang in find_hangs(job)] or _unexplained(job)
    durations = price(job, cluster, options, calibration, progress)
    progress("simulating")
    host_factor = calibration.runs.host if calibration is not None and calibration.runs is not None else 1.0
    timeline = None if hangs else simulate(job, durations, cluster, host=options.host, host_factor=host_factor)
    return Analysis(job, cluster, options, durations, timeline, hangs, calibration)


def _unexplained(job: JobTrace) -> list[str]:
    """Reports ranks that wait for something that no emulated rank provides, for example a key of the store."""
    stopped = any(trace.meta["ended"] == "stopped" for trace in job.ranks.values())
    # A rank without steps may wait for one that was stopped after the requested steps.
    waiting = [trace for trace in job.ranks.values() if trace.steps or not stopped]
    reasons = sorted({trace.meta.get("hung", "") for trace in waiting} - {""})
    advice = "If a rank that was not emulated would end this wait, emulate it too: use --ranks all, or name the ranks."
    return [f"This job would hang: {reason}. {advice}" for reason in reasons]
