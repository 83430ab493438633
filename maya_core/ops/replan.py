"""A trace's memory on another GPU: the same calls with the temporaries, workspaces and attention kernels of that GPU.

What a kernel takes and gives back within its call is marked in a trace. On another GPU the calls are planned anew, and such a block gets the
size of what the call takes there at its fullest. Whatever lives longer is the program's own and stays. The number of events stays
too, so what refers to them by number holds.
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

ROUND = 512  # the allocator's
UNSPLIT = 2**20  # a large block that is larger by up to so much is given whole


@dataclass(frozen=True)
class Replanned:
    """A trace with another GPU's temporaries and workspaces in it."""

    trace: RankTrace
    unplaced_bytes: int  # the most that a call takes there for which the recorded one has no block to hold it


def _rounded(nbytes: int) -> int:
    return max(ROUND, -(-nbytes // ROUND) * ROUND) if nbytes else 0


def beyond_outputs(call: Call, work: Work) -> int:
    """Bytes that a call takes at its fullest beyond what it leaves behind."""
    outputs = [_rounded(tensor.nbytes) for tensor in call.results]
    held: list[int] = []
    made: set[int] = set()
    now = fullest = 0
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
        fullest = max(fullest, now)
    rest = sum(size for place, size in enumerate(outputs) if place not in made)
    fullest = max(fullest, now + rest)
    return fullest - sum(outputs)


def replanned(trace: RankTrace, recorded: Platform, platform: Platform) -> Replanned:
    """The trace as it would have been recorded on the platform, as far as its memory goes."""
    events = trace.events.copy()
    here = [beyond_outputs(call, plan(call, recorded)) for call in trace.calls]
    there = [beyond_outputs(call, plan(call, platform)) for call in trace.calls]
    unplaced = _place_temporaries(events, here, there)
    _resize_workspaces(trace, events, blas_workspace_bytes(recorded.gpu), blas_workspace_bytes(platform.gpu))
    return Replanned(replace(trace, events=events), unplaced)


def _place_temporaries(events: np.ndarray, here: Sequence[int], there: Sequence[int]) -> int:
    """Gives the blocks of each call's temporaries the size they have there; returns the most that found no block."""
    temporary = (events["flags"] & TEMPORARY) > 0
    made = np.flatnonzero(temporary & (events["kind"] == EventKind.ALLOC))
    freed = np.flatnonzero(temporary & (events["kind"] == EventKind.FREE))
    calls = np.flatnonzero(events["kind"] == EventKind.OP)
    changed = np.array([a != b for a, b in zip(here, there, strict=True)], bool)
    sizes = np.array(there, np.int64)
    wanted = np.zeros(len(events), bool)
    for thread in np.unique(events["thread"][calls]).tolist():
        own = calls[events["thread"][calls] == thread]
        blocks = made[events["thread"][made] == thread]
        place = np.searchsorted(own, blocks)
        blocks, place = blocks[place < len(own)], place[place < len(own)]
        owner = own[place]  # the call that a block is of: the next one on its thread
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
    """Where each block is given back: the next event that frees its address; -1 if none does."""
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
    """cuBLAS's workspaces, which are labelled as such, in the size they have there. One that the user sized stays."""
    for device in devices_used(trace):
        every = blocks(trace, device)
        usual = (every.bytes >= recorded) & (every.bytes < recorded + UNSPLIT)
        those = np.flatnonzero((every.category == Category.WORKSPACES) & usual)
        events["b"][every.made[those]] = wanted
        freed = every.freed[those]
        events["b"][freed[freed < len(events)]] = wanted
