"""Finds hangs: places where ranks of a job would wait for one another forever, with what each rank does there.

This module compares the calls that meet; dry_run.py finds circles where all calls match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from maya_core.trace.call_names import (
    call_in_words,
    communicator_in_words,
    elements,
    frames_of_interest,
    ranks_in_words,
)
from maya_core.trace.communication import POINT_TO_POINT, CollectiveCall, Communicator, Site
from maya_core.trace.dry_run import is_buffered, stuck_calls
from maya_core.trace.job import JobTrace, Rendezvous
from maya_core.trace.schema import EventKind

HANGS = "would hang"
GOES_WRONG = "would hang or continue with wrong data"  # NCCL does not compare what its ranks are given

_SAME_TO_NCCL = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
_ENDED = {
    "completed": "its program has ended",
    "hung": "would wait forever",
    "stopped": "stopped after the requested steps",
    "failed": "failed (see its own error)",
}


@dataclass(frozen=True)
class Side:
    """What some ranks, which all do the same, are doing where the job hangs."""

    ranks: tuple[int, ...]
    doing: str
    site: Site

    def __str__(self) -> str:
        frames = [f"    {frame.file}:{frame.line} in {frame.function}" for frame in frames_of_interest(self.site)]
        return "\n".join([f"  {ranks_in_words(self.ranks)}: {self.doing}", *frames])


@dataclass(frozen=True)
class Hang:
    """A place where a job does not continue. Its `str` is for the terminal."""

    verdict: str
    problem: str
    sides: tuple[Side, ...]
    communicator: Communicator | None = None  # None: several
    call: int | None = None  # from 1, as in the logs of torch's NCCL watchdog

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for side in self.sides for rank in side.ranks}))

    def __str__(self) -> str:
        return "\n".join([f"This job {self.verdict}: {self.problem}", *map(str, self.sides)])


def find_hangs(job: JobTrace) -> list[Hang]:
    """The first problem on every communicator and between every two ranks. If all calls match, their order is checked."""
    found: list[Hang] = []
    left_by_failed: list[tuple[Rendezvous, int]] = []
    numbered = _numbered_terms(job)
    for meet in job.rendezvous:
        if len(meet.members) < 2:
            continue
        made_by_all = meet.complete
        row = _first_difference(job, meet, made_by_all, numbered)
        if row is not None:
            found.append(_difference(job, meet, row))
        elif made_by_all < len(meet.events):
            absent, present = _attendance(meet, made_by_all)
            if any(job.ranks[rank].meta["ended"] == "failed" for rank in absent):
                left_by_failed.append((meet, made_by_all))
            elif not _cut_off(job, absent, present):
                found.append(_absence(job, meet, made_by_all))
    if left_by_failed:
        found.insert(0, _failure(job, left_by_failed))
    return found or _circle(job)


# ---- what has to agree ----


def _terms(call: CollectiveCall) -> tuple[object, ...]:
    """The arguments that must be equal in all ranks of a call."""
    op = "message" if call.op in POINT_TO_POINT else _SAME_TO_NCCL.get(call.op, call.op)
    if op == "barrier":
        return (op,)
    if _is_by_pair(call):
        return (op, call.dtype, "by pair")
    root = -1 if op == "message" else call.peer
    return (op, call.dtype, elements(call), root, call.reduction)


def _is_by_pair(call: CollectiveCall) -> bool:
    """Whether each pair of ranks has a size of its own, on which these two must agree."""
    return call.op == "all_to_all" or (call.op == "all_gather" and bool(call.splits_out))


def _numbered_terms(job: JobTrace) -> dict[int, np.ndarray]:
    """For every call of every rank, a number that is equal where the terms are equal."""
    numbers: dict[tuple[object, ...], int] = {}
    return {
        rank: np.array([numbers.setdefault(_terms(call), len(numbers)) for call in trace.collectives], np.int64)
        for rank, trace in job.ranks.items()
    }


def _first_difference(job: JobTrace, meet: Rendezvous, end: int, numbered: dict[int, np.ndarray]) -> int | None:
    """The first call before `end` on which the members do not agree."""
    calls = [job.ranks[rank].events["subject"][meet.events[:end, column]] for column, rank in enumerate(meet.members)]
    terms = [numbered[rank][mine] for rank, mine in zip(meet.members, calls, strict=True)]
    differing = np.flatnonzero(np.any([others != terms[0] for others in terms[1:]], axis=0))
    first = int(differing[0]) if len(differing) else None
    by_pair = np.array([_is_by_pair(call) for call in job.ranks[meet.members[0]].collectives], bool)
    seen: set[tuple[int, ...]] = set()
    for row in np.flatnonzero(by_pair[calls[0][:first]]).tolist():
        combination = tuple(int(mine[row]) for mine in calls)
        if combination not in seen and any(_uneven_pairs(job, meet, row)):
            return int(row)
        seen.add(combination)
    return first


def _uneven_pairs(job: JobTrace, meet: Rendezvous, row: int) -> Iterator[str]:
    """Describes the pairs of ranks of which one sends an amount that the other does not expect. Amounts that a rank only assumed about
    another one (how many tokens it routes to an expert) are not compared."""
    group = meet.communicator.ranks
    calls = [(rank, group.index(rank), _call(job, meet, row, rank)) for rank in meet.members]
    for giver, from_place, given in calls:
        for taker, to_place, taken in calls:
            gives, takes = given.elements_in, taken.elements_out // len(group)
            if given.op == "all_to_all":
                gives = given.splits_in[to_place] if given.splits_in else gives // len(group)
            if taken.splits_out:
                takes = taken.splits_out[from_place]
            assumed = taken.splits_out and giver in job.ranks[taker].meta.get("assumed_ranks", ())
            if gives != takes and not assumed:
                yield f"rank {giver} sends {gives:,} elements to rank {taker}, which expects {takes:,}"


def _attendance(meet: Rendezvous, row: int) -> tuple[list[int], list[int]]:
    """Members that never make the call, and those that do."""
    makes_call = dict(zip(meet.members, (meet.events[row] >= 0).tolist(), strict=True))
    return [rank for rank in makes_call if not makes_call[rank]], [rank for rank in makes_call if makes_call[rank]]


def _cut_off(job: JobTrace, absent: list[int], present: list[int]) -> bool:
    """Whether Maya stopped the absent ranks while the present ones, which take fewer steps or none, continued."""
    return all(
        job.ranks[one].meta["ended"] == "stopped"
        and (job.ranks[other].meta["ended"] != "hung" or not job.ranks[other].steps)
        and job.ranks[one].steps > job.ranks[other].steps
        for one in absent
        for other in present
    )


# ---- the kinds of hang ----


def _difference(job: JobTrace, meet: Rendezvous, row: int) -> Hang:
    calls = [_call(job, meet, row, rank) for rank in meet.members]
    same_op = meet.messages or len({_terms(call)[0] for call in calls}) == 1
    problem = f"the ranks disagree in {_place(meet, row)}"
    if same_op and all(map(_is_by_pair, calls)):
        problem = ": ".join([problem, *_uneven_pairs(job, meet, row)][:2])
    sides = _merged([_side(job, meet, row, rank) for rank in meet.members])
    return Hang(GOES_WRONG if same_op else HANGS, problem, sides, meet.communicator, row + 1)


def _absence(job: JobTrace, meet: Rendezvous, row: int) -> Hang:
    absent, present = _attendance(meet, row)
    sides = _merged([_side(job, meet, row, rank) for rank in present] + [_last_of(job, rank) for rank in absent])
    verdict, problem = HANGS, f"{ranks_in_words(absent)} never make{'s' * (len(absent) == 1)} {_place(meet, row)}"
    if meet.messages:
        problem = f"{_place(meet, row)} is never {'received' if present[0] == meet.members[0] else 'sent'}"
        verdict = GOES_WRONG if is_buffered(_call(job, meet, row, present[0])) else HANGS
    return Hang(verdict, problem, sides, meet.communicator, row + 1)


def _failure(job: JobTrace, left: list[tuple[Rendezvous, int]]) -> Hang:
    """One hang for all communicators on which ranks wait for failed ones. Each rank is shown where it first waits."""
    absent = {rank for meet, row in left for rank in _attendance(meet, row)[0]}
    failed = sorted(rank for rank in absent if job.ranks[rank].meta["ended"] == "failed")
    waiting: dict[int, tuple[int, Side]] = {}
    for meet, row in left:
        for rank in _attendance(meet, row)[1]:
            at = _event(meet, row, rank)
            if rank not in waiting or at < waiting[rank][0]:
                waiting[rank] = at, _side(job, meet, row, rank, placed=True)
    sides = [side for _, side in waiting.values()] + [_last_of(job, rank) for rank in failed]
    problem = f"{ranks_in_words(failed)} failed, and {ranks_in_words(sorted(waiting))} would wait forever"
    return Hang(HANGS, problem, _merged(sides))


def _circle(job: JobTrace) -> list[Hang]:
    sides = []
    for stuck in stuck_calls(job):
        side = _side(job, job.rendezvous[stuck.rendezvous], stuck.call, stuck.rank, placed=True)
        sides.append(Side(side.ranks, f"{side.doing}, waiting for {ranks_in_words(stuck.waits_for)}", side.site))
    problem = "every call has a match, but the ranks wait for each other in a cycle"
    return [Hang(HANGS, problem, _merged(sides))] if sides else []


# ---- what a rank is doing ----


def _event(meet: Rendezvous, row: int, rank: int) -> int:
    return int(meet.events[row, meet.members.index(rank)])


def _call(job: JobTrace, meet: Rendezvous, row: int, rank: int) -> CollectiveCall:
    trace = job.ranks[rank]
    return trace.collectives[int(trace.events["subject"][_event(meet, row, rank)])]


def _side(job: JobTrace, meet: Rendezvous, row: int, rank: int, placed: bool = False) -> Side:
    """A rank in a call of the rendezvous. `placed` adds which call that is, where the problem does not say it."""
    trace = job.ranks[rank]
    text = f"in {call_in_words(_call(job, meet, row, rank), meet.communicator)}"
    site = trace.sites[int(trace.events["b"][_event(meet, row, rank)])]
    return Side((rank,), f"{text}, {_place(meet, row)}" if placed else text, site)


def _last_of(job: JobTrace, rank: int) -> Side:
    """How a rank ended, and its last call."""
    trace = job.ranks[rank]
    ended = _ENDED[trace.meta["ended"]]
    made = trace.events[trace.events["kind"] == EventKind.COLLECTIVE]
    if not len(made):
        return Side((rank,), f"{ended} without a collective call", ())
    call = trace.collectives[int(made["subject"][-1])]
    group = trace.communicators[call.communicator]
    text = f"{ended}; its last collective call was {call_in_words(call, group)} on {communicator_in_words(group)}"
    return Side((rank,), text, trace.sites[int(made["b"][-1])])


def _merged(sides: Sequence[Side]) -> tuple[Side, ...]:
    """Merges ranks that do the same at the same place."""
    merged: dict[object, Side] = {}
    for side in sides:
        key = side.doing, frames_of_interest(side.site)
        before = merged.get(key)
        merged[key] = Side((before.ranks if before else ()) + side.ranks, side.doing, side.site)
    return tuple(merged.values())


def _place(meet: Rendezvous, row: int) -> str:
    on = communicator_in_words(meet.communicator)
    if meet.messages:
        return f"message {row + 1:,} from rank {meet.members[0]} to rank {meet.members[1]} on {on}"
    return f"call {row + 1:,} on {on}"
