"""Computes a trace's memory on another GPU: the same calls with the temporaries, workspaces and attention kernels of that GPU.

Memory that a kernel allocates and frees within its call is marked in a trace. The calls are planned for the other GPU, and such a block gets
the size that the call needs there at its peak. Memory that lives longer belongs to the program and stays as it is. The number of events
stays the same, so references to them stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from maya_core.hardware.platform import Platform
from maya_core.ops.plan import plan
from maya_core.ops.products import blas_workspace_bytes
from maya_core.ops.work import Step, Work
from maya_core.trace.call import Call
from maya_core.trace.memory_peaks import blocks, devices_used
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import TEMPORARY, Category, EventKind

ROUND = 512  # block granularity of the allocator
UNSPLIT = 2**20  # a large block that exceeds a request by no more than this is not split


@dataclass(frozen=True)
class Replanned:
    """A trace with the temporaries and workspaces of another GPU."""

    trace: RankTrace
    unplaced_bytes: int  # the largest need of a call on that GPU for which the recorded call has no block


def _rounded(nbytes: int) -> int:
    return max(ROUND, -(-nbytes // ROUND) * ROUND) if nbytes else 0


def beyond_outputs(call: Call, work: Work) -> int:
    """The bytes that a call needs at its peak beyond its outputs."""
    outputs = [_rounded(tensor.nbytes) for tensor in call.results]
    held: list[int] = []
    made: set[int] = set()
    now = peak = 0
    for step, value in work.program:
        if step == Step.TEMPORARY:
            held.append(_rounded(value))
            now += held[-1]
        elif step == Step.FREE:
            now -= held[value]
            held[value] = 0
        elif step == Step.OUTPUT and value < len(outputs) and value not in made:
            made.add(value)
            now += outputs[value]
        peak = max(peak, now)
    rest = sum(size for place, size in enumerate(outputs) if place not in made)
    peak = max(peak, now + rest)
    return peak - sum(outputs)


def replanned(trace: RankTrace, recorded: Platform, platform: Platform) -> Replanned:
    """The trace with the memory events that it would have if it were recorded on the platform."""
    events = trace.events.copy()
    before = [beyond_outputs(call, plan(call, recorded)) for call in trace.calls]
    after = [beyond_outputs(call, plan(call, platform)) for call in trace.calls]
    unplaced = _place_temporaries(events, before, after)
    _resize_workspaces(trace, events, blas_workspace_bytes(recorded), blas_workspace_bytes(platform))
    return Replanned(replace(trace, events=events), unplaced)


def _place_temporaries(events: np.ndarray, before: Sequence[int], after: Sequence[int]) -> int:
    """Gives the blocks of each call's temporaries their new sizes. Returns the largest need of a call without such a block."""
    temporary = (events["flags"] & TEMPORARY) > 0
    made = np.flatnonzero(temporary & (events["kind"] == EventKind.ALLOC))
    freed = np.flatnonzero(temporary & (events["kind"] == EventKind.FREE))
    calls = np.flatnonzero(events["kind"] == EventKind.OP)
    changed = np.array([a != b for a, b in zip(before, after, strict=True)], bool)
    sizes = np.array(after, np.int64)
    wanted = np.zeros(len(events), bool)
    for thread in np.unique(events["thread"][calls]).tolist():
        own = calls[events["thread"][calls] == thread]
        blocks = made[events["thread"][made] == thread]
        place = np.searchsorted(own, blocks)
        blocks, place = blocks[place < len(own)], place[place < len(own)]
        owner = own[place]  # the call that a block belongs to: the next one on its thread
        subject = events["subject"][owner]
        _, first = np.unique(owner, return_index=True)
        size = np.zeros(len(blocks), np.int64)
        size[first] = sizes[subject[first]]
        those = changed[subject]
        ends = _ends_of(events, blocks[those], freed)
        events["b"][blocks[those]] = size[those]
        events["b"][ends[ends >= 0]] = size[those][ends >= 0]
        wanted[owner] = True
    bare = calls[~wanted[calls]]
    left = events["subject"][bare]
    return int(sizes[left][changed[left]].max(initial=0))


def _ends_of(events: np.ndarray, blocks: np.ndarray, freed: np.ndarray) -> np.ndarray:
    """The event that frees each block: the next one that frees its address; -1 if none does."""
    ends = np.full(len(blocks), -1, np.int64)
    if not len(freed):
        return ends
    order = np.lexsort((freed, events["a"][freed]))
    keys = np.stack([events["a"][freed][order], freed[order]], axis=1)
    for place, block in enumerate(blocks.tolist()):
        address = events["a"][block]
        low = np.searchsorted(keys[:, 0], address, "left")
        high = np.searchsorted(keys[:, 0], address, "right")
        later = keys[low:high, 1]
        next_one = later[np.searchsorted(later, block)] if len(later) and later[-1] > block else -1
        ends[place] = next_one
    return ends


def _resize_workspaces(trace: RankTrace, events: np.ndarray, recorded: int, wanted: int) -> None:
    """Gives cuBLAS's workspaces, which are labelled, the size of the other GPU. One whose size the user chose stays."""
    for device in devices_used(trace):
        every = blocks(trace, device)
        usual = (every.bytes >= recorded) & (every.bytes < recorded + UNSPLIT)
        those = np.flatnonzero((every.category == Category.WORKSPACES) & usual)
        events["b"][every.made[those]] = wanted
        freed = every.freed[those]
        events["b"][freed[freed < len(events)]] = wanted
