"""What-if against emulation: python tests/golden/what_if_pairs.py [PROGRAM ...]

A program's trace of one GPU, priced for another, is held against its trace of that other. Prints the ratio of step times and of peak
allocated memory for every ordered pair that differs by more than is allowed, and the worst of each program; the exit code is 1 if any does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import golden
from rich.console import Console
from rich.table import Table

from maya_core.api import what_if
from maya_core.errors import MayaError
from maya_core.trace.job import JobTrace

TIME_WITHIN, MEMORY_WITHIN = 0.005, 0.01


class Pair(NamedTuple):
    program: str
    recorded: str  # the GPU of the trace
    priced: str  # the GPU it is priced for
    time: float  # what-if by emulation
    memory: float

    @property
    def fails(self) -> bool:
        return abs(self.time - 1) > TIME_WITHIN or abs(self.memory - 1) > MEMORY_WITHIN

    @property
    def distance(self) -> float:
        """The larger of the two differences, each in what is allowed of it."""
        return max(abs(self.time - 1) / TIME_WITHIN, abs(self.memory - 1) / MEMORY_WITHIN)


def outcome(job: JobTrace, gpu: str) -> tuple[float, int]:
    """Step time and peak allocated bytes of the job on that GPU."""
    prediction = what_if(job, gpu=gpu)
    assert prediction.step_time_s is not None
    return prediction.step_time_s, max(row.peak_allocated_bytes for row in prediction.memory.ranks)


def pairs(program: str) -> Iterator[Pair]:
    """Every ordered pair of the GPUs that the program was recorded on."""
    jobs = {gpu: golden.read(program, gpu) for gpu in golden.recorded()[program]}
    own = {gpu: outcome(job, gpu) for gpu, job in jobs.items()}
    for recorded, job in jobs.items():
        for priced in jobs.keys() - {recorded}:
            try:
                time, memory = outcome(job, priced)
            except MayaError:  # the trace does not tell: torch would run other ops there
                yield Pair(program, recorded, priced, math.nan, math.nan)
            else:
                yield Pair(program, recorded, priced, time / own[priced][0], memory / own[priced][1])


def table(title: str, rows: list[Pair]) -> Table:
    made = Table("program", "recorded on", "priced for", "time", "memory", title=title)
    for row in rows:
        made.add_row(row.program, row.recorded, row.priced, f"{row.time:.3f}", f"{row.memory:.3f}")
    return made


def main(programs: list[str]) -> int:
    found = [sorted(pairs(program)) for program in programs or golden.recorded()]
    failing = [pair for rows in found for pair in rows if pair.fails]
    console = Console(width=100)
    console.print(table(f"{len(failing)} of {sum(map(len, found))} pairs differ", failing))
    console.print(table("the worst of each program", [max(rows, key=lambda pair: pair.distance) for rows in found]))
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
