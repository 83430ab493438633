"""Turns traces and durations into a schedule for the clock.

Each event of a rank that takes time or orders other events becomes an item. clock.py computes when the items happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from maya_core.hardware.cluster import Cluster
from maya_core.hardware.host_costs import Host
from maya_core.ops.kernel import Copy
from maya_core.predictor.collective_time import batch_seconds, buffer_bytes
from maya_core.predictor.placement import Placement, place
from maya_core.predictor.pricing import TraceDurations
from maya_core.simulator.clock import LinkUse, Schedule, WorkKind
from maya_core.simulator.contention import pressure
from maya_core.simulator.host import host_seconds, seconds_alone
from maya_core.trace.communication import POINT_TO_POINT
from maya_core.trace.dry_run import is_buffered
from maya_core.trace.job import JobTrace, meetings_of
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import ON_HOST, EventKind

PLAYED = (
    EventKind.OP, EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC, EventKind.STREAM_SYNC, EventKind.DEVICE_SYNC, EventKind.STEP_END,
    EventKind.GRAPH_LAUNCH, EventKind.COLLECTIVE, EventKind.GROUP_END, EventKind.HOST_WORK,
    EventKind.EVALUATION,
)  # fmt: skip
_SAME = {
    EventKind.EVENT_RECORD: WorkKind.RECORD,
    EventKind.EVENT_WAIT: WorkKind.WAIT,
    EventKind.EVENT_SYNC: WorkKind.HOST_EVENT,
    EventKind.STREAM_SYNC: WorkKind.HOST_LANE,
    EventKind.DEVICE_SYNC: WorkKind.HOST_DEVICE,
    EventKind.STEP_END: WorkKind.MARK,
    EventKind.GRAPH_LAUNCH: WorkKind.MARK,
    EventKind.HOST_WORK: WorkKind.MARK,
    EventKind.EVALUATION: WorkKind.MARK,
    EventKind.COLLECTIVE: WorkKind.MEET,
    EventKind.GROUP_END: WorkKind.MEET,
}


@dataclass(frozen=True)
class RankItems:
    """A rank's part of the schedule. `event` is the place of the item's event in the trace; for a group, the place of its first call."""

    event: np.ndarray
    kind: np.ndarray
    lane: np.ndarray
    subject: np.ndarray
    host_s: np.ndarray
    work_s: np.ndarray
    parts: list[tuple[int, list[int]]]  # items that meet, with the places of their calls in the trace


@dataclass
class _Meetings:
    """The meetings of the whole job, numbered in the order in which they are found."""

    members: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    pressure: list[float] = field(default_factory=list)
    link: list[int] = field(default_factory=list)

    def new(self, members: int) -> int:
        self.members.append(members)
        self.seconds.append(0.0)
        self.pressure.append(0.0)
        self.link.append(LinkUse.UNSHARED)
        return len(self.members) - 1


def make_schedule(
    job: JobTrace, durations: dict[int, TraceDurations], cluster: Cluster, host: Host
) -> tuple[Schedule, dict[int, RankItems]]:
    """Returns the job's schedule, and each rank's part of it."""
    numbers, members = meetings_of(job)
    meetings = _Meetings()
    for count in members.tolist():
        meetings.new(count)
    lanes = 0
    devices: dict[tuple[int, int], int] = {}
    device_of: list[int] = []
    ranks: dict[int, RankItems] = {}
    meeting: list[int] = []
    waits: list[bool] = []
    part_counts = []
    event_total = 0
    for rank, trace in job.ranks.items():
        for device, _ in trace.streams:
            device_of.append(devices.setdefault((rank, device), len(devices)))
        items, event_total = _items(rank, trace, durations[rank], host, lanes, event_total, devices)
        ranks[rank] = items
        counts = np.zeros(len(items.kind), np.int64)
        calls = _Calls(rank, trace, durations[rank], cluster)
        subjects, rendezvous = trace.events["subject"], numbers[rank].tolist()
        for number, made in items.parts:
            counts[number] = len(made)
            for meets, goes_alone in _parts(calls, made, subjects[made].tolist(), rendezvous, meetings):
                meeting.append(meets)
                waits.append(not goes_alone)
        part_counts.append(counts)
        lanes += len(trace.streams)
    whole = list(ranks.values())
    return (
        Schedule(
            kind=np.concatenate([items.kind for items in whole]),
            lane=np.concatenate([items.lane for items in whole]),
            subject=np.concatenate([items.subject for items in whole]),
            host_s=np.concatenate([items.host_s for items in whole]),
            work_s=np.concatenate([items.work_s for items in whole]),
            first_part=np.concatenate([[0], np.cumsum(np.concatenate(part_counts))]),
            meeting=np.array(meeting, np.int32),
            waits=np.array(waits, np.uint8),
            first_item=np.concatenate([[0], np.cumsum([len(items.kind) for items in whole])]),
            device_of=np.array(device_of, np.int32),
            members=np.array(meetings.members, np.int32),
            meeting_s=np.array(meetings.seconds),
            pressure=np.array(meetings.pressure),
            link=np.array(meetings.link, np.uint8),
            devices=len(devices),
            events=event_total,
        ),
        ranks,
    )


def _items(
    rank: int,
    trace: RankTrace,
    durations: TraceDurations,
    host: Host,
    first_lane: int,
    first_event: int,
    devices: dict[tuple[int, int], int],
) -> tuple[RankItems, int]:
    events = trace.events
    groups, grouped = _groups(trace)
    played = np.isin(events["kind"], PLAYED)
    played[grouped] = False
    played[[end for end in np.flatnonzero(events["kind"] == EventKind.GROUP_END).tolist() if end not in groups]] = False
    # A trace does not say when a host waits for a message between host tensors, so the host is assumed never to wait.
    on_host = (events["kind"] == EventKind.COLLECTIVE) & ((events["flags"] & ON_HOST) > 0)
    message = np.array([call.op in POINT_TO_POINT for call in trace.collectives] or [False])
    played &= ~(on_host & message[np.where(on_host, events["subject"], 0)])
    subject, event_total = _event_numbers(events, played, first_event)
    chosen = np.flatnonzero(played)

    rows = events[chosen]
    kind = np.zeros(max(EventKind) + 1, np.uint8)
    for recorded, same in _SAME.items():
        kind[recorded] = same
    kinds = kind[rows["kind"]]
    kinds[on_host[chosen]] = WorkKind.HOST_MEET
    ops = rows["kind"] == EventKind.OP
    kinds[ops] = _work(durations)[rows["subject"][ops]]
    work = np.zeros(len(chosen))
    work[ops] = seconds_alone(durations)[rows["subject"][ops]]
    subjects = subject[chosen]
    whole_device = kinds == WorkKind.HOST_DEVICE
    subjects[whole_device] = [devices.get((rank, device), -1) for device in rows["device"][whole_device].tolist()]
    shown = chosen.copy()
    parts = []
    for number in np.flatnonzero((kinds == WorkKind.MEET) | (kinds == WorkKind.HOST_MEET)).tolist():
        calls = groups.get(int(chosen[number]), [int(chosen[number])])
        shown[number] = calls[0]
        parts.append((number, calls))
    items = RankItems(
        shown, kinds, rows["stream"].astype(np.int32) + first_lane, subjects.astype(np.int32),
        host_seconds(trace, durations, chosen, host), work, parts,
    )  # fmt: skip
    return _in_order_on_communicators(trace, items, event_total)


def _groups(trace: RankTrace) -> tuple[dict[int, list[int]], list[int]]:
    """The calls that form one launch, by the event that ends their group; and all such calls in one list."""
    found: dict[int, list[int]] = {}
    opened: dict[int, list[int]] = {}  # by stream
    if not (trace.events["kind"] == EventKind.GROUP_BEGIN).any():
        return found, []
    chosen = np.flatnonzero(
        np.isin(trace.events["kind"], (EventKind.COLLECTIVE, EventKind.GROUP_BEGIN, EventKind.GROUP_END))
    )
    columns = (trace.events[name][chosen].tolist() for name in ("kind", "stream", "flags"))
    begin, end = int(EventKind.GROUP_BEGIN), int(EventKind.GROUP_END)
    for index, kind, stream, flags in zip(chosen.tolist(), *columns, strict=True):
        if kind == begin:
            opened[stream] = []
        elif kind == end:
            if calls := opened.pop(stream, []):
                found[index] = calls
        elif stream in opened and not flags & ON_HOST:
            opened[stream].append(index)
    return found, [call for calls in found.values() for call in calls]


def _event_numbers(events: np.ndarray, played: np.ndarray, first: int) -> tuple[np.ndarray, int]:
    """Numbers each record of a CUDA event, and gives each wait the number of its record: the last one before it with the same event
    and version, because replays of a graph record the same version again. A wait for an event that was never recorded is not played."""
    numbers = np.full(len(events), -1, np.int64)
    records = np.flatnonzero(events["kind"] == EventKind.EVENT_RECORD)
    numbers[records] = first + np.arange(len(records))
    waiting = np.flatnonzero((events["kind"] == EventKind.EVENT_WAIT) | (events["kind"] == EventKind.EVENT_SYNC))
    both = np.concatenate([records, waiting])
    names = np.unique((events["subject"][both].astype(np.int64) << 32) + events["a"][both], return_inverse=True)[1]
    places = names * len(events) + both  # sorts by event and version, then by time
    made, wanted = places[: len(records)], places[len(records) :]
    order = np.argsort(made)
    last = np.searchsorted(made[order], wanted) - 1
    known = last >= 0
    known[known] = made[order[last[known]]] // len(events) == wanted[known] // len(events)
    numbers[waiting[known]] = first + order[last[known]]
    played[waiting[~known]] = False
    return numbers, first + len(records)


def _work(priced: TraceDurations) -> np.ndarray:
    """The kind of work of each call."""
    kinds = np.full(max(1, len(priced.kernels)), WorkKind.COMPUTE, np.uint8)
    for number, kernels in enumerate(priced.kernels):
        if not kernels:
            kinds[number] = WorkKind.MARK
            continue
        ways = {kernel.direction if isinstance(kernel, Copy) else "" for kernel in kernels}
        if ways in ({"h2d"}, {"d2h"}):  # an op that first copies a table of pointers to the device is still compute
            kinds[number] = WorkKind.COPY_IN if ways == {"h2d"} else WorkKind.COPY_OUT
    return kinds


def _in_order_on_communicators(trace: RankTrace, items: RankItems, events: int) -> tuple[RankItems, int]:
    """Adds waits between lanes, because NCCL runs the calls of one communicator in order, on whichever streams they are launched."""
    last: dict[int, int] = {}  # the last item of each communicator
    after: list[tuple[int, int]] = []  # (item to wait for, item that waits)
    subjects, communicator_of = trace.events["subject"], [call.communicator for call in trace.collectives]
    for number, calls in items.parts:
        if items.kind[number] != WorkKind.MEET:
            continue
        for communicator in {communicator_of[call] for call in subjects[calls].tolist()}:
            before = last.get(communicator)
            if before is not None and items.lane[before] != items.lane[number]:
                after.append((before, number))
            last[communicator] = number
    if not after:
        return items, events
    places = np.array([place for before, later in after for place in (before + 1, later)])
    sources = np.array([place for before, later in after for place in (before, later)])
    kinds = np.tile([WorkKind.RECORD, WorkKind.WAIT], len(after)).astype(np.uint8)
    numbers = np.repeat(np.arange(events, events + len(after)), 2)
    order = np.lexsort((np.tile([0, 1], len(after)), places))  # records before waits at the same place
    moved = np.arange(len(items.kind)) + np.searchsorted(np.sort(places), np.arange(len(items.kind)), side="right")
    nothing = np.zeros(len(places))

    def inserted(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.insert(old, places[order], new[order].astype(old.dtype))

    return RankItems(
        inserted(items.event, items.event[sources]), inserted(items.kind, kinds), inserted(items.lane, items.lane[sources]),
        inserted(items.subject, numbers), inserted(items.host_s, nothing), inserted(items.work_s, nothing),
        [(int(moved[number]), calls) for number, calls in items.parts],
    ), events + len(after)  # fmt: skip


class _Calls:
    """A rank's distinct calls as meetings: their durations, how much they slow compute, and the links that they share."""

    def __init__(self, rank: int, trace: RankTrace, durations: TraceDurations, cluster: Cluster) -> None:
        self.rank, self.trace, self.cluster = rank, trace, cluster
        self.seconds = durations.collectives.seconds.tolist()
        self.alone = [is_buffered(call) for call in trace.collectives]
        self.pressure: list[float] = []
        self.link: list[LinkUse] = []
        places: dict[tuple[int, ...], Placement] = {}
        for call, seconds in zip(trace.collectives, self.seconds, strict=True):
            group = trace.communicators[call.communicator]
            one_way = call.op in POINT_TO_POINT
            if group.backend != "nccl":
                self.pressure.append(0.0)
                self.link.append(LinkUse.UNSHARED)
                continue
            ends = tuple(sorted({rank, group.ranks[call.peer]})) if one_way else group.ranks
            if ends not in places:
                places[ends] = place(ends, cluster)
            where = places[ends]
            rate = buffer_bytes(call, group, cluster) / seconds if seconds else 0.0
            self.pressure.append(pressure(where, cluster, rate))
            within = LinkUse.WITHIN_NODE if where.islands == 1 else LinkUse.BETWEEN_NODES
            self.link.append(LinkUse.UNSHARED if one_way else within)
        self._batches: dict[tuple[int, ...], float] = {}

    def together(self, calls: tuple[int, ...]) -> float:
        """The duration of a batch of messages that the rank starts at once."""
        if calls not in self._batches:
            ways: dict[str, list[tuple[int, float]]] = {way: [] for way in POINT_TO_POINT}
            for number in calls:
                call = self.trace.collectives[number]
                group = self.trace.communicators[call.communicator]
                if call.op in ways:
                    ways[call.op].append((group.ranks[call.peer], buffer_bytes(call, group, self.cluster)))
            self._batches[calls] = batch_seconds(ways["send"], ways["recv"], self.rank, self.cluster)
        return self._batches[calls]


def _parts(
    calls: _Calls, events: list[int], subjects: list[int], numbers: list[int], meetings: _Meetings
) -> Iterator[tuple[int, bool]]:
    """The meetings of an item, each as (number, whether this rank is done without the others)."""
    batch = tuple(subjects)
    for event, subject in zip(events, subjects, strict=True):
        number = numbers[event] if numbers[event] >= 0 else meetings.new(1)
        one_way = len(batch) > 1 and calls.trace.collectives[subject].op in POINT_TO_POINT
        own = calls.together(batch) if one_way else calls.seconds[subject]
        meetings.seconds[number] = max(meetings.seconds[number], own)
        meetings.pressure[number] = calls.pressure[subject]
        meetings.link[number] = calls.link[subject]
        yield number, calls.alone[subject]
