"""Which of the job's ranks every emulated rank stands for."""

from __future__ import annotations

from bisect import bisect_right

from maya_core.report import wording
from maya_core.trace.call_names import ranks_in_words
from maya_core.trace.job import JobTrace

MOST_LINES = 3


def stands_for(job: JobTrace) -> dict[int, list[int]]:
    """The ranks that each emulated rank stands for, itself among them: of those that the program treats alike, the ones after it up to the next
    emulated one. Stages of a pipeline are numbered so, too."""
    found: dict[int, list[int]] = {rank: [] for rank in sorted(job.ranks)}
    for alike in classes(job):
        emulated = [rank for rank in alike if rank in found] or sorted(found)
        for rank in alike:
            found[emulated[max(0, bisect_right(emulated, rank) - 1)]].append(rank)
    return found


def classes(job: JobTrace) -> list[list[int]]:
    """Ranks that the program treats alike."""
    for trace in job.ranks.values():
        if differences := trace.meta.get("rank_differences"):
            return [list(alike) for alike in differences["classes"]]
    return [list(range(job.processes))]


def weights(job: JobTrace) -> dict[int, int]:
    """How many ranks each emulated rank counts for. If the program does not treat its ranks differently, they are assumed to be distributed
    evenly."""
    if len(classes(job)) == 1:
        return dict.fromkeys(job.ranks, 1)
    return {rank: len(ranks) for rank, ranks in stands_for(job).items()}


def caveats(job: JobTrace) -> list[str]:
    lines = [
        line for trace in job.ranks.values() for line in (trace.meta.get("rank_differences") or {}).get("lines", [])
    ]
    if not lines:
        return []
    named = ", ".join(dict.fromkeys(map(wording.short_source, lines[:MOST_LINES])))
    more = ", ..." if len(lines) > MOST_LINES else ""
    alike = classes(job)
    missing = sum(not set(ranks) & set(job.ranks) for ranks in alike)
    told = (
        f"Ranks may do different work ({named}{more}), so {ranks_in_words(sorted(job.ranks))} were emulated"
        if len(job.ranks) > 1
        else f"Ranks may do different work ({named}{more}), but only {ranks_in_words(sorted(job.ranks))} was emulated"
    )
    unseen = (
        f" {missing:,} of {len(alike):,} kinds of ranks were not: --ranks emulates those that you name."
        if missing
        else ""
    )
    return [f"{told}.{unseen}"]
