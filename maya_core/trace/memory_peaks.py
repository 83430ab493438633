"""Memory in the course of a trace: its blocks, what they hold, and the peak of each device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import Category, EventKind, Phase

# What a block holds: its label if it has one, otherwise a category by the phase that allocated it.
ACTIVATIONS, TEMPORARIES = len(Category), len(Category) + 1
CATEGORIES = (*(category.name.lower() for category in Category), "activations", "temporaries")


@dataclass(frozen=True)
class Blocks:
    """Every block that was allocated on a device, in order."""

    made: np.ndarray  # places in the trace's events
    freed: np.ndarray  # the number of events if it was never freed
    bytes: np.ndarray
    category: np.ndarray  # index into CATEGORIES


@dataclass(frozen=True)
class Share:
    """The blocks at the peak that one place of the program allocated."""

    module: str
    phase: Phase
    source: str  # file:line; "" if no line of Python allocated them
    category: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class DevicePeak:
    """The moment of most allocated memory on a device, and the most memory that it reserved from the driver."""

    device: int
    allocated_bytes: int
    reserved_bytes: int
    by_category: dict[str, int]  # at the peak; adds up to allocated_bytes
    phase: Phase
    module: str
    source: str
    step: int  # of the peak, from 1
    shares: list[Share]  # largest first; add up to allocated_bytes


def devices_used(trace: RankTrace) -> list[int]:
    memory = trace.events[np.isin(trace.events["kind"], (EventKind.ALLOC, EventKind.FREE, EventKind.OUT_OF_MEMORY))]
    answer: list[int] = np.unique(memory["device"]).tolist()
    return answer


def blocks(trace: RankTrace, device: int) -> Blocks:
    """The device's blocks. A label may come long after the allocation: gradients are labelled at the optimizer's step."""
    events = trace.events
    here = events["device"] == device
    made = np.flatnonzero(here & (events["kind"] == EventKind.ALLOC))
    ends = np.flatnonzero(here & (events["kind"] == EventKind.FREE))
    freed = np.full(len(made), len(events), np.int64)
    # Sorted by address and then by time, each block is followed by its end.
    owner = _latest(events["a"], made, ends)
    freed[owner[owner >= 0]] = ends[owner >= 0]
    by_phase = np.full(len(Phase), TEMPORARIES, np.uint8)
    by_phase[[Phase.FORWARD, Phase.RECOMPUTE, Phase.VALIDATION]] = ACTIVATIONS
    category = by_phase[events["phase"][made]]
    labels = np.flatnonzero(here & (events["kind"] == EventKind.LABEL))
    owner = _latest(events["a"], made, labels)
    alive = owner >= 0
    alive[alive] = freed[owner[alive]] > labels[alive]
    category[owner[alive]] = events["subject"][labels[alive]]
    return Blocks(made, freed, events["b"][made], category)


def _latest(address: np.ndarray, made: np.ndarray, later: np.ndarray) -> np.ndarray:
    """For each of these events, the last block allocated before it at its address; -1 if there is none."""
    if not len(made) or not len(later):
        return np.full(len(later), -1, np.int64)
    order = np.lexsort((made, address[made]))
    both = np.concatenate([made[order], later])
    places = np.lexsort((both, address[both]))
    is_block = places < len(made)
    last = np.maximum.accumulate(np.where(is_block, places, -1))
    found = np.empty(len(both), np.int64)
    found[places] = last
    result = found[len(made) :]
    known = result >= 0
    known[known] = address[made[order[result[known]]]] == address[later[known]]
    return np.where(known, order[np.maximum(result, 0)], -1)


def allocated(trace: RankTrace, device: int) -> np.ndarray:
    """Bytes allocated after each event."""
    return _running(trace, device, EventKind.ALLOC, EventKind.FREE)


def reserved(trace: RankTrace, device: int) -> np.ndarray:
    """Bytes that the caching allocator has reserved from the driver after each event."""
    return _running(trace, device, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)


def _running(trace: RankTrace, device: int, more: EventKind, less: EventKind) -> np.ndarray:
    events = trace.events
    here = events["device"] == device
    signs = np.zeros(len(events), np.int64)
    signs[here & (events["kind"] == more)] = 1
    signs[here & (events["kind"] == less)] = -1
    return np.cumsum(signs * events["b"])


def device_peaks(trace: RankTrace) -> list[DevicePeak]:
    """The peak of each device that was used."""
    return [_peak(trace, device) for device in devices_used(trace)]


def _peak(trace: RankTrace, device: int) -> DevicePeak:
    events = trace.events
    used = allocated(trace, device)
    at = int(np.argmax(used))
    every = blocks(trace, device)
    live = (every.made <= at) & (every.freed > at)
    totals = np.bincount(every.category[live], every.bytes[live], len(CATEGORIES))
    return DevicePeak(
        device,
        int(used[at]),
        int(reserved(trace, device).max(initial=0)),
        {name: int(total) for name, total in zip(CATEGORIES, totals, strict=True)},
        Phase(int(events["phase"][at])),
        trace.modules[int(events["module"][at])],
        source_of(trace, at),
        step_at(trace, at),
        _shares(trace, every, np.flatnonzero(live)),
    )


def _shares(trace: RankTrace, every: Blocks, live: np.ndarray) -> list[Share]:
    rows = trace.events[every.made[live]]
    keys = np.stack([rows["module"], rows["phase"], rows["subject"], every.category[live]]).astype(np.int64)
    distinct, group = np.unique(keys, axis=1, return_inverse=True)
    nbytes = np.bincount(group.ravel(), every.bytes[live])
    counts = np.bincount(group.ravel())
    found = [
        Share(trace.modules[module], Phase(phase), trace.lines[line], CATEGORIES[category], int(size), int(count))
        for (module, phase, line, category), size, count in zip(distinct.T.tolist(), nbytes, counts, strict=True)
    ]
    return sorted(found, key=lambda share: (-share.bytes, share.module, share.source))


def source_of(trace: RankTrace, event: int) -> str:
    """The line of the program that made an allocation."""
    if trace.events["kind"][event] != EventKind.ALLOC:
        return ""
    return trace.lines[int(trace.events["subject"][event])]


def step_at(trace: RankTrace, event: int) -> int:
    """The step of an event, counted from 1. Validation counts for the step that it follows."""
    before = int(np.count_nonzero(trace.events["kind"][:event] == EventKind.STEP_END))
    return max(before, 1) if trace.events["phase"][event] == Phase.VALIDATION else before + 1
