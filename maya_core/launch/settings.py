"""What an emulated process is told, by its parent's environment or by `emulate`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from maya_core.predictor.attention_kind import DEFAULT_ATTENTION

VARIABLE = "MAYA_EMULATE"


class ProcessSettings(BaseModel):
    """One emulated process: its hardware, how long it runs and where its trace goes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str
    gpus: PositiveInt | None = None  # of a node; None: nobody said, so one
    nodes: PositiveInt | None = None  # None: nobody said, or a launcher of the user's did
    steps: PositiveInt | None = None  # None: to the program's own end
    out: Path | None = None
    ranks_per_node: PositiveInt | None = None  # None: one for each GPU
    rank: int | None = 0  # None: known once the program joins a process group
    world_size: PositiveInt = 1
    chosen: tuple[int, ...] = ()  # ranks the user asked for by number
    coordinator: Path | None = None  # socket of the command that started it
    note_files: bool = False  # which ones of the user's the program reads
    # Of the prediction, for programs that run several jobs and want one of each (a framework's own tuner):
    node: str | None = None
    network: str | None = None
    attention: str = DEFAULT_ATTENTION
    host: str = "modelled"
