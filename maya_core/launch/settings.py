"""What an emulated process is told, by its parent's environment or by `emulate`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

VARIABLE = "MAYA_EMULATE"


class Settings(BaseModel):
    """One emulated process: its hardware, how long it runs and where its trace goes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str
    gpus: PositiveInt | None = None  # of a node; None: nobody said, so one
    steps: PositiveInt | None = None  # None: to the program's own end
    out: Path | None = None
    rank: int | None = 0  # None: known once the program joins a process group
    world_size: PositiveInt = 1
    chosen: tuple[int, ...] = ()  # ranks the user asked for by number
    coordinator: Path | None = None  # socket of the command that started it
