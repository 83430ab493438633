"""Memory over the trace: the peak of each device and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import Category, Kind, Phase


@dataclass(frozen=True)
class DevicePeak:
    """The moment of most allocated memory on a device, and the most it held from the driver."""

    device: int
    allocated_bytes: int
    reserved_bytes: int
    by_category: dict[str, int]  # at the peak; adds up to allocated_bytes
    phase: Phase
    module: str
    step: int  # in which it falls, from 1


def _category_of(phase: int) -> str:
    """What an unlabelled block is taken for, by the phase that made it."""
    if phase in (Phase.FORWARD, Phase.RECOMPUTE):
        return "activations"
    return "temporaries"


def device_peaks(trace: RankTrace) -> list[DevicePeak]:
    """The peak of every device that was used."""
    memory = trace.events[np.isin(trace.events["kind"], (Kind.ALLOC, Kind.FREE))]
    return [_peak(trace, int(device)) for device in np.unique(memory["device"])]


def _peak(trace: RankTrace, device: int) -> DevicePeak:
    events = trace.events
    here = events["device"] == device
    signs = np.zeros(len(events), np.int64)
    signs[here & (events["kind"] == Kind.ALLOC)] = 1
    signs[here & (events["kind"] == Kind.FREE)] = -1
    allocated = np.cumsum(signs * events["b"])
    at = int(np.argmax(allocated))
    segments = np.zeros(len(events), np.int64)
    segments[here & (events["kind"] == Kind.SEGMENT_ALLOC)] = 1
    segments[here & (events["kind"] == Kind.SEGMENT_FREE)] = -1
    reserved = int(np.cumsum(segments * events["b"]).max(initial=0))
    return DevicePeak(
        device,
        int(allocated[at]),
        reserved,
        _live_by_category(events, here, at),
        Phase(int(events["phase"][at])),
        trace.modules[int(events["module"][at])],
        int(np.count_nonzero(events["kind"][:at] == Kind.STEP_END)) + 1,
    )


def _live_by_category(events: np.ndarray, here: np.ndarray, at: int) -> dict[str, int]:
    """Bytes live just after event `at`. A block's label may come after the peak (gradients are labelled at the optimizer's step)."""
    kinds = (Kind.ALLOC, Kind.FREE, Kind.LABEL)
    chosen = np.flatnonzero(here & np.isin(events["kind"], kinds))
    live: dict[int, int] = {}  # address: index of the event that allocated it
    at_peak: dict[int, str] = {}  # allocating event: category
    labels: dict[int, str] = {}
    peak_taken = False
    kind, address, subject = events["kind"], events["a"], events["subject"]
    for index in chosen.tolist():
        if index > at and not peak_taken:
            at_peak = {made: _category_of(int(events["phase"][made])) for made in live.values()}
            peak_taken = True
        where = int(address[index])
        if kind[index] == Kind.ALLOC:
            live[where] = index
        elif kind[index] == Kind.FREE:
            live.pop(where, None)
        elif where in live:
            labels[live[where]] = Category(int(subject[index])).name.lower()
    if not peak_taken:
        at_peak = {made: _category_of(int(events["phase"][made])) for made in live.values()}
    totals: dict[str, int] = dict.fromkeys(
        [*(category.name.lower() for category in Category), "activations", "temporaries"], 0
    )
    for made, guess in at_peak.items():
        totals[labels.get(made, guess)] += int(events["b"][made])
    return totals
