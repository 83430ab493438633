"""A job on a clock: `simulate(job, cluster)` gives its Timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from maya_core.hardware.cluster import Cluster
from maya_core.predictor.pricing import TraceDurations
from maya_core.simulator.clock import WorkKind, play
from maya_core.simulator.host import Host
from maya_core.simulator.schedule import make_schedule
from maya_core.trace.job import JobTrace
from maya_core.trace.schema import EventKind


@dataclass(frozen=True)
class RankTimeline:
    """When a rank's items happened, in seconds from the job's start. By item, in the order its host issued them."""

    rank: int
    event: np.ndarray  # place in the rank's trace
    kind: np.ndarray  # of WorkKind
    lane: np.ndarray  # index into the trace's streams
    issued: np.ndarray
    began: np.ndarray
    met: np.ndarray  # of a collective: everybody is there and data moves
    over: np.ndarray
    step_ends: np.ndarray  # when the work of each step, and its host, was done

    def on_device(self) -> np.ndarray:
        """Items that take the GPU's time."""
        return np.flatnonzero(self.kind <= WorkKind.MEET)


@dataclass(frozen=True)
class Timeline:
    ranks: dict[int, RankTimeline]

    @property
    def step_ends(self) -> np.ndarray:
        """When every rank that takes steps was done with each."""
        ends = [rank.step_ends for rank in self.ranks.values() if len(rank.step_ends)] or [np.zeros(0)]
        steps = min(len(each) for each in ends)
        return np.asarray(np.max([each[:steps] for each in ends], axis=0))

    @property
    def end(self) -> float:
        return max((float(rank.over.max(initial=0.0)) for rank in self.ranks.values()), default=0.0)


def simulate(
    job: JobTrace,
    durations: dict[int, TraceDurations],
    cluster: Cluster,
    *,
    host: Host = Host.MODELLED,
    host_factor: float = 1.0,
) -> Timeline:
    """Plays the job on the cluster. Ranks that were not emulated run in lockstep with those that were. The host takes `host_factor` times
    as long as it is taken to."""
    schedule, items = make_schedule(job, durations, cluster, host)
    schedule = replace(schedule, host_s=schedule.host_s * host_factor)
    times = play(schedule)
    ranks = {}
    first_lane = 0
    for place, (rank, own) in enumerate(items.items()):
        here = slice(int(schedule.first_item[place]), int(schedule.first_item[place + 1]))
        over = times.over[here]
        events = job.ranks[rank].events
        marks = np.flatnonzero((own.kind == WorkKind.MARK) & (events["kind"][own.event] == EventKind.STEP_END))
        done = np.maximum.accumulate(over) if len(over) else over
        ranks[rank] = RankTimeline(
            rank, own.event, own.kind, own.lane - first_lane, times.issued[here], times.began[here], times.met[here], over,
            done[marks],
        )  # fmt: skip
        first_lane += len(job.ranks[rank].streams)
    return Timeline(ranks)
