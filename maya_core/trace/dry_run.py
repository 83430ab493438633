"""Finds out whether the ranks of a job wait for one another in a circle, from the order of events alone.

Each rank's host issues its events in order, streams are queues, and a collective is over once it has reached the head of the
stream in every member. Durations play no part, so an event that is never reached here is never reached at all.
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

# The default of NCCL_BUFFSIZE: a message up to this size completes for its sender before it is received.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-buffsize
BUFFERED_BYTES = 4 * 2**20

# Plain numbers, because the loop over events is hot.
COLLECTIVE, RECORD, WAIT = int(EventKind.COLLECTIVE), int(EventKind.EVENT_RECORD), int(EventKind.EVENT_WAIT)
EVENT_SYNC, STREAM_SYNC, DEVICE_SYNC = int(EventKind.EVENT_SYNC), int(EventKind.STREAM_SYNC), int(EventKind.DEVICE_SYNC)
GROUP_BEGIN, GROUP_END = int(EventKind.GROUP_BEGIN), int(EventKind.GROUP_END)
_ORDERING = (RECORD, WAIT, EVENT_SYNC, STREAM_SYNC, DEVICE_SYNC, GROUP_BEGIN, GROUP_END)


@dataclass(frozen=True)
class BlockedCall:
    """A call that begins and never ends."""

    rank: int
    rendezvous: int  # index into the job's
    call: int
    waits_for: tuple[int, ...]  # ranks that never reach it


class _Arrival(NamedTuple):
    """A call of a rank reaches the head of its stream."""

    rank: int
    meeting: int  # one call of one rendezvous
    point: int
    waits: bool  # for the others to arrive


class _Order:
    """A graph of points in the job. A point is over once all points before it are. Point 0 is the beginning; the meetings follow."""

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
        """Whether each point is ever reached."""
        unmet = list(self.unmet)
        ready = [point for point, count in enumerate(unmet) if not count]
        while ready:
            for later in self.next[ready.pop()]:
                unmet[later] -= 1
                if not unmet[later]:
                    ready.append(later)
        return [not count for count in unmet]


def _follow(rank: int, trace: RankTrace, meetings: np.ndarray, order: _Order) -> Iterator[_Arrival]:
    """Adds one rank's calls to the order. A call that meets no other rank delays nobody and is skipped."""
    events, join = trace.events, order.join
    buffered = [is_buffered(call) for call in trace.collectives]
    host = 0  # the point that the host has waited for
    streams: dict[int, int] = {}  # the last point queued on each stream
    recorded: dict[tuple[int, int], int] = {}  # the point before an event, by event and version
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
            # The trace does not say when the host waits for a message, so the host is assumed never to wait.
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
    """Whether this is a message that completes for its sender before it is received."""
    return call.op == "send" and call.elements_in * item_bytes(call.dtype) <= BUFFERED_BYTES


def _meetings(job: JobTrace) -> dict[int, np.ndarray]:
    """For every event of every rank, the number of its meeting, from 1; -1 if it has none, or no other rank takes part."""
    numbers, members = meetings_of(job)
    shared = np.append(members > 1, False)  # the last entry is for -1
    return {rank: np.where(shared[own], own + 1, -1) for rank, own in numbers.items()}


def stuck_calls(job: JobTrace) -> list[BlockedCall]:
    """The calls in which ranks wait for one another forever; empty if the job runs to its end."""
    firsts = np.cumsum([1] + [len(meet.events) for meet in job.rendezvous])
    order = _Order(int(firsts[-1]) - 1)
    meetings = _meetings(job)
    arrivals = [one for rank, trace in job.ranks.items() for one in _follow(rank, trace, meetings[rank], order)]
    over = order.over()
    late: dict[int, list[int]] = {}
    for arrival in arrivals:
        if not over[arrival.point]:
            late.setdefault(arrival.meeting, []).append(arrival.rank)
    stuck: dict[tuple[int, int], BlockedCall] = {}  # only the first call of a group on one communicator is reported
    for arrival in arrivals:
        if arrival.waits and arrival.meeting in late and over[arrival.point]:
            number = int(np.searchsorted(firsts, arrival.meeting, side="right")) - 1
            call = arrival.meeting - int(firsts[number])
            stuck.setdefault(
                (arrival.rank, number), BlockedCall(arrival.rank, number, call, tuple(late[arrival.meeting]))
            )
    return list(stuck.values())
