"""A job without a clock: what has to be over before what, and so whether its ranks ever wait for one another in a circle.

Each rank's host goes through its events in order; streams are queues; a collective is over once every member's has come
to the head of its stream. How long anything takes plays no part, so what never comes to its turn here never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from maya_core.hardware.dtypes import item_bytes
from maya_core.trace.communication import POINT_TO_POINT, CollectiveCall
from maya_core.trace.job import JobTrace, meetings_of
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import ON_HOST, EventKind

# NCCL_BUFFSIZE, as it is unless set: a message up to this size leaves its sender before anybody receives it.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-buffsize
BUFFERED_BYTES = 4 * 2**20

# Plain numbers: the loop over events is hot.
COLLECTIVE, RECORD, WAIT = int(EventKind.COLLECTIVE), int(EventKind.EVENT_RECORD), int(EventKind.EVENT_WAIT)
EVENT_SYNC, STREAM_SYNC, DEVICE_SYNC = int(EventKind.EVENT_SYNC), int(EventKind.STREAM_SYNC), int(EventKind.DEVICE_SYNC)
GROUP_BEGIN, GROUP_END = int(EventKind.GROUP_BEGIN), int(EventKind.GROUP_END)
_ORDERING = (RECORD, WAIT, EVENT_SYNC, STREAM_SYNC, DEVICE_SYNC, GROUP_BEGIN, GROUP_END)


@dataclass(frozen=True)
class BlockedCall:
    """A call that is begun and never over."""

    rank: int
    rendezvous: int  # index into the job's
    call: int
    waits_for: tuple[int, ...]  # ranks that never come to it


class _Arrival(NamedTuple):
    """A rank's call comes to the head of its stream."""

    rank: int
    meeting: int  # one call of one rendezvous
    point: int
    waits: bool  # for the others to come


class _Order:
    """Points in the course of the job, each over once those it comes after are. The first is the beginning, then come the meetings."""

    def __init__(self, meetings: int) -> None:
        self.unmet = [0] * (1 + meetings)
        self.next: list[list[int]] = [[] for _ in self.unmet]

    def put(self, later: int, earlier: int) -> None:
        self.unmet[later] += 1
        self.next[earlier].append(later)

    def join(self, one: int, other: int) -> int:
        """The point at which both are over."""
        if one == other or not other:
            return one
        if not one:
            return other
        point = len(self.unmet)
        self.unmet.append(2)
        self.next.append([])
        self.next[one].append(point)
        self.next[other].append(point)
        return point

    def over(self) -> list[bool]:
        """Which points the job ever gets to."""
        unmet = list(self.unmet)
        ready = [point for point, count in enumerate(unmet) if not count]
        while ready:
            for later in self.next[ready.pop()]:
                unmet[later] -= 1
                if not unmet[later]:
                    ready.append(later)
        return [not count for count in unmet]


def _follow(rank: int, trace: RankTrace, meetings: np.ndarray, order: _Order) -> Iterator[_Arrival]:
    """Puts one rank's calls into the order. A call that meets nobody holds nobody up, and is not looked at."""
    events, join = trace.events, order.join
    buffered = [is_buffered(call) for call in trace.collectives]
    host = 0  # what it has waited for
    streams: dict[int, int] = {}  # what is queued on each
    recorded: dict[tuple[int, int], int] = {}  # what was queued before an event, by event and version
    groups: dict[int, list[tuple[int, int]]] = {}  # open ones, by stream
    chosen = np.flatnonzero((meetings >= 0) | np.isin(events["kind"], _ORDERING))
    columns = [events[name][chosen].tolist() for name in ("kind", "subject", "a", "stream", "device", "flags")]
    for kind, subject, a, stream, device, flags, meeting in zip(*columns, meetings[chosen].tolist(), strict=True):
        queued = streams.get(stream, 0)
        launch: list[tuple[int, int]] = []
        if kind == RECORD:
            recorded[subject, a] = queued
        elif kind == WAIT:
            streams[stream] = join(queued, recorded.get((subject, a), 0))
        elif kind == COLLECTIVE and flags & ON_HOST:
            # The trace does not say when the host waits for a message, so it is taken never to.
            waits = trace.collectives[subject].op not in POINT_TO_POINT
            order.put(meeting, host)
            yield _Arrival(rank, meeting, host, waits)
            host = meeting if waits else host
        elif kind == COLLECTIVE and stream in groups:
            groups[stream].append((meeting, subject))
        elif kind == COLLECTIVE:
            launch = [(meeting, subject)]
        elif kind == STREAM_SYNC:
            host = join(host, queued)
        elif kind == EVENT_SYNC:
            host = join(host, recorded.get((subject, a), 0))
        elif kind == DEVICE_SYNC:
            host = reduce(join, (point for one, point in streams.items() if trace.streams[one][0] == device), host)
        elif kind == GROUP_BEGIN:
            groups[stream] = []
        else:
            launch = groups.pop(stream, [])
        if launch:
            head = join(host, queued)
            for meeting, call in launch:
                order.put(meeting, head)
                yield _Arrival(rank, meeting, head, not buffered[call])
            streams[stream] = reduce(join, [meeting for meeting, call in launch if not buffered[call]] or [head])


def is_buffered(call: CollectiveCall) -> bool:
    """Is this a message that is over for its sender before anybody receives it?"""
    return call.op == "send" and call.elements_in * item_bytes(call.dtype) <= BUFFERED_BYTES


def _meetings(job: JobTrace) -> dict[int, np.ndarray]:
    """For every event of every rank the number of the meeting it is part of, from 1; -1 if none, or alone there."""
    numbers, members = meetings_of(job)
    shared = np.append(members > 1, False)  # the last stands for -1
    return {rank: np.where(shared[own], own + 1, -1) for rank, own in numbers.items()}


def stuck_calls(job: JobTrace) -> list[BlockedCall]:
    """The calls in which ranks of the job wait for one another for ever; empty if it runs to its end."""
    firsts = np.cumsum([1] + [len(meet.events) for meet in job.rendezvous])
    order = _Order(int(firsts[-1]) - 1)
    meetings = _meetings(job)
    arrivals = [one for rank, trace in job.ranks.items() for one in _follow(rank, trace, meetings[rank], order)]
    over = order.over()
    late: dict[int, list[int]] = {}
    for arrival in arrivals:
        if not over[arrival.point]:
            late.setdefault(arrival.meeting, []).append(arrival.rank)
    stuck: dict[tuple[int, int], BlockedCall] = {}  # of a group on one communicator its first call says enough
    for arrival in arrivals:
        if arrival.waits and arrival.meeting in late and over[arrival.point]:
            number = int(np.searchsorted(firsts, arrival.meeting, side="right")) - 1
            call = arrival.meeting - int(firsts[number])
            stuck.setdefault(
                (arrival.rank, number), BlockedCall(arrival.rank, number, call, tuple(late[arrival.meeting]))
            )
    return list(stuck.values())
