"""The settings of one emulated process, which its parent passes on in the environment."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from maya_core.request import Request
from maya_core.trace.unknown_read import Extreme

VARIABLE = "MAYA_EMULATE"


class ProcessSettings(BaseModel):
    """What the user requested, and the process's place in the job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request: Request
    folder: Path | None = None  # of the run, where the trace is written; None: nowhere
    gpus: PositiveInt | None = None  # visible to the process; None: neither the user nor a launcher has said, so one
    machine_visible: str | None = None  # CUDA_VISIBLE_DEVICES where Maya was started
    ranks_per_node: PositiveInt | None = None  # None: one for each GPU
    rank: int | None = 0  # None: known once the program joins a process group
    world_size: PositiveInt = 1
    chosen: tuple[int, ...] = ()  # ranks that the user asked for by number
    coordinator: Path | None = None  # the socket of the command that started it
    unknown: Extreme | None = None  # what masks keep that depend on unknown values; None: as many as a sample
    inherited: bool = False  # by a program that the emulated program started: it counts if it trains or starts ranks
    note_files: bool = False  # whether to note which of the user's files the program reads

    def for_programs(self) -> ProcessSettings:
        """The settings of programs that this process starts."""
        return self.model_copy(update={"rank": None, "world_size": 1, "inherited": True})
