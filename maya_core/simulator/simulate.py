"""Simulates a job on a cluster: `simulate` returns the Timeline of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from maya_core.hardware.cluster import Cluster
from maya_core.hardware.host_costs import Host
from maya_core.predictor.pricing import TraceDurations
from maya_core.simulator.clock import WorkKind, play
from maya_core.simulator.schedule import make_schedule
from maya_core.trace.job import JobTrace
from maya_core.trace.schema import EventKind


@dataclass(frozen=True)
class RankTimeline:
    """When a rank's items happen, in seconds from the job's start. Arrays are by item, in the order in which the host issues them."""

    rank: int
    event: np.ndarray  # place in the rank's trace
    kind: np.ndarray  # of WorkKind
    lane: np.ndarray  # index into the trace's streams
    issued: np.ndarray
    began: np.ndarray
    met: np.ndarray  # of a collective: all members have arrived and data moves
    over: np.ndarray
    step_ends: np.ndarray  # when each step is done, on the device and on the host

    def on_device(self) -> np.ndarray:
        """The items that use the GPU."""
        return np.flatnonzero(self.kind <= WorkKind.MEET)


@dataclass(frozen=True)
class Timeline:
    ranks: dict[int, RankTimeline]

    @property
    def step_ends(self) -> np.ndarray:
        """When all ranks that take steps are done with each step."""
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
    """Simulates the job on the cluster. Ranks that were not emulated run in lockstep with those that were. The host's times are multiplied
    by `host_factor`."""
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
