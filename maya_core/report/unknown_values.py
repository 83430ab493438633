"""Tells which unknown values steer the program: as rows of the prediction, and as caveats in words."""

from __future__ import annotations

from maya_core.report import wording
from maya_core.report.prediction import Memory, MemoryLimit, UnknownValue
from maya_core.trace.job import JobTrace
from maya_core.trace.unknown_read import UnknownRead

MOST_CAVEATS = 8  # places that get a caveat of their own
MOST_LINES = 3


def unknown_values(job: JobTrace) -> list[UnknownValue]:
    return [
        UnknownValue(
            source=read.source,
            library=read.library,
            kind=read.how,
            decides=read.use,
            at=read.decides,
            reads=read.reads,
            taken=_taken(read),
            given=read.assumed,
        )
        for read in job.unknown_reads
    ]


def _taken(read: UnknownRead) -> float | None:
    if read.how == "scalar":
        return read.number
    if read.how == "largest":
        return read.kept / read.reads
    return read.kept / read.elements if read.elements else None


def caveats(values: list[UnknownValue]) -> list[str]:
    """What was taken for each unknown value, sizes first."""
    unknown = sorted((value for value in values if not value.given), key=lambda value: value.decides != "size")
    found = [_sentence(value) for value in unknown[:MOST_CAVEATS]]
    if more := len(unknown) - len(found):
        found.append(
            f"{more} more line{'s' * (more != 1)} of the program read values that are not known: see `unknown_values` in the JSON."
        )
    return found + [f"As you said, {_place(value)} {_outcome(value)}." for value in values if value.given]


def memory_in_words(memory: Memory) -> str:
    """The verdict on memory that depends on unknown values: its limits, and the lines that it depends on."""
    lines = ", ".join(map(wording.short_source, memory.depends_on[:MOST_LINES]))
    because = f"because it depends on values that nobody knows ({lines})"
    if memory.bounds is None:
        return f"not known to fit, {because}; `maya run` finds its limits"
    ends = [_bound(bound) for bound in (memory.bounds.none_kept, memory.bounds.all_kept)]
    limits = f"{ends[0]} if masks keep nothing, {ends[1]} if they keep everything"
    if memory.fits:
        return f"fits in any case: {limits} ({lines})"
    return f"{'does not fit' if memory.fits is False else 'not known to fit'}, {because}: {limits}"


def _bound(bound: MemoryLimit) -> str:
    if bound.used_bytes is None:
        return "not known"
    return ("at least " if bound.fits is False else "") + wording.size(bound.used_bytes)


def _sentence(value: UnknownValue) -> str:
    place = wording.short_source(value.source)
    what = "SHARE" if value.kind in ("mask", "distinct") else "NUMBER"
    times = f"read {value.reads:,} time{'s' * (value.reads != 1)}"
    return (
        f"Work depends on a value that is not known: {_place(value)} {_outcome(value)} ({times}). "
        f"To say what it is: --assume {place}={what}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"  # also inf, which is no integer


def _place(value: UnknownValue) -> str:
    place = wording.short_source(value.source) or "a place outside of the program"
    return f"{place} (in {wording.short_source(value.library)})" if value.library else place


def _outcome(value: UnknownValue) -> str:
    taken = value.taken
    if taken is None:
        outcome = "reads a number"
    elif value.kind == "mask":
        outcome = f"keeps {wording.share(taken)} of a mask"
    elif value.kind == "distinct":
        outcome = f"finds {wording.share(taken)} of the elements distinct"
    elif value.kind == "sum":
        outcome = f"repeats each element {taken:.3g} times"
    else:
        outcome = f"reads {'a largest number of ' if value.kind == 'largest' else ''}{_number(taken)}"
    decides = {"size": "", "branch": ", which decides a branch", "loop": ", which decides when a loop ends"}[
        value.decides
    ]
    if value.decides == "size" and value.kind == "scalar":
        decides = ", which decides a size"
    return outcome + decides + (f" at {wording.short_source(value.at)}" if value.at and decides else "")
