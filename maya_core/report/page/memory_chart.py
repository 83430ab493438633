"""The data of the memory chart: the memory of each GPU over the run by category, reduced to what a chart can show."""

from __future__ import annotations

from typing import Any

import numpy as np

from maya_core.report.analysis import Analysis
from maya_core.report.page.timeline_chart import packed
from maya_core.report.prediction import DeviceMemory, Memory
from maya_core.report.wording import moment
from maya_core.simulator.clock import WorkKind
from maya_core.simulator.simulate import RankTimeline
from maya_core.trace.memory_peaks import CATEGORIES, allocated, blocks, reserved
from maya_core.trace.schema import EventKind

MOST_DEVICES = 8
STRETCHES = 600  # intervals of the run; the lowest and the highest value of each are kept
KIB = 1024


def shown(memory: Memory) -> list[DeviceMemory]:
    """The GPUs that are drawn: the fullest one first, then the others by rank."""
    fullest = memory.fullest
    if fullest is None:
        return []
    others = [one for one in memory.ranks if one is not fullest and one.peak_allocated_bytes]
    return [fullest, *others[: MOST_DEVICES - 1]]


def curves(analysis: Analysis, memory: Memory) -> list[dict[str, Any]]:
    return [_curve(analysis, one) for one in shown(memory)]


def _curve(analysis: Analysis, one: DeviceMemory) -> dict[str, Any]:
    trace = analysis.job.ranks[one.rank]
    timeline = analysis.timeline.ranks.get(one.rank) if analysis.timeline is not None else None
    at = _moments(len(trace.events), timeline)
    used = allocated(trace, one.device)
    places = _thinned(at, used, int(np.argmax(used)))
    steps = np.flatnonzero(trace.events["kind"] == EventKind.STEP_END)
    return {
        "rank": one.rank,
        "device": one.device,
        "timed": timeline is not None,
        "at": at[places].round(9).tolist(),
        "categories": {
            name: packed(values, "<u4") for name, values in _by_category(analysis, one, places) if values.any()
        },
        "reserved": packed(reserved(trace, one.device)[places] // KIB, "<u4"),
        "peak": places.tolist().index(int(np.argmax(used))),
        "steps": at[steps].round(9).tolist(),
        "capacity": one.capacity_bytes // KIB,
        "outside": one.outside_allocator_bytes // KIB,
        "asked": (one.out_of_memory_bytes or 0) // KIB,
        "where": {
            "moment": moment(one.peak_step, one.peak_phase),
            "module": one.peak_module,
            "source": one.peak_source,
        },
    }


def _moments(events: int, timeline: RankTimeline | None) -> np.ndarray:
    """When the GPU reached the work that each event belongs to; for a job without a timeline, the order of events.

    The host allocates ahead of the GPU. In the host's time, a step would be a spike followed by a long wait.
    """
    work = timeline.on_device() if timeline is not None else np.zeros(0, np.int64)
    work = work[timeline.kind[work] != WorkKind.MEET] if timeline is not None else work
    if timeline is None or not len(work):
        return np.arange(events, dtype=float)
    next_work = np.minimum(np.searchsorted(timeline.event[work], np.arange(events)), len(work) - 1)
    return np.maximum.accumulate(timeline.began[work])[next_work]


def _thinned(at: np.ndarray, used: np.ndarray, peak: int) -> np.ndarray:
    """The events to draw: the ones with the least and the most memory of each interval, and the peak."""
    if len(at) <= 2 * STRETCHES:
        return np.arange(len(at))
    span = float(at[-1] - at[0]) or 1.0
    stretch = np.minimum((at - at[0]) / span * STRETCHES, STRETCHES - 1).astype(np.int64)
    order = np.lexsort((used, stretch))
    firsts = np.flatnonzero(np.diff(stretch[order], prepend=-1))
    lasts = np.append(firsts[1:], len(order)) - 1
    return np.unique(np.concatenate([order[firsts], order[lasts], [0, peak, len(at) - 1]]))


def _by_category(analysis: Analysis, one: DeviceMemory, places: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The KiB of each category after each of these events."""
    every = blocks(analysis.job.ranks[one.rank], one.device)
    found = []
    for number, name in enumerate(CATEGORIES):
        those = every.category == number
        live = _total_until(every.made[those], every.bytes[those], places)
        gone = _total_until(every.freed[those], every.bytes[those], places)
        found.append((name, (live - gone) // KIB))
    return found


def _total_until(events: np.ndarray, sizes: np.ndarray, places: np.ndarray) -> np.ndarray:
    order = np.argsort(events, kind="stable")
    totals = np.concatenate([[0], np.cumsum(sizes[order])])
    return totals[np.searchsorted(events[order], places, side="right")]
