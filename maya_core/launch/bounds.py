"""Runs a program twice more if its memory depends on values that nobody knows: once with every unknown mask keeping nothing, and once with all
of them keeping everything. What memory the job really needs lies between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from maya_core.errors import MayaError
from maya_core.launch.ranks import RankSetting
from maya_core.messages import say
from maya_core.trace.job import JobTrace, bound_folder, write_manifest
from maya_core.trace.unknown_read import EXTREMES, Extreme

OUTPUT = "output.log"  # of the program, in the folder of each of the two runs


class Ran(Protocol):
    """What a run of the program leaves."""

    @property
    def job(self) -> JobTrace | None: ...


RunOnce = Callable[[Path, RankSetting | None, Extreme | None], Ran]


def needs_bounds(job: JobTrace) -> bool:
    """Whether a size depends on an unknown value that the user has not given."""
    return any(read.decides_memory for read in job.unknown_reads)


def run_bounds(out: Path, setting: RankSetting | None, run: RunOnce) -> dict[Extreme, JobTrace | None]:
    """The job at both extremes; None where the program failed for another reason than memory."""
    if setting is None:
        say(
            "memory depends on values that nobody knows, so the program runs twice more: with masks that keep nothing, and "
            "with masks that keep everything"
        )
    found: dict[Extreme, JobTrace | None] = {}
    for extreme in EXTREMES:
        folder = bound_folder(out, extreme)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / OUTPUT).open("wb") as file:
            quiet = dataclasses.replace(setting or RankSetting(), output=(file, file))
            try:
                job = run(folder, quiet, extreme).job
            except MayaError:  # a rank was killed
                job = None
        if job is not None:
            write_manifest(folder, job)
        found[extreme] = job
    return found
