"""The runs in a folder, as `maya runs` lists them."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel
from rich.table import Table

from maya_core.errors import MayaError
from maya_core.report import wording
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import read_prediction
from maya_core.report.terminal import plain_table
from maya_core.report.unknown_values import memory_in_words
from maya_core.trace.job import PREDICTION
from maya_core.trace.run_folder import State, read_about, runs_in, state_of


class ListedRun(BaseModel):
    """A run. Figures are None if there is no prediction."""

    name: str
    folder: Path
    started: datetime
    state: State
    command: str
    gpus: int | None = None
    gpu: str
    step_time_s: float | None = None
    memory_bytes: int | None = None  # of the fullest GPU, with what is outside of the allocator
    fits: bool | None = None
    verdict: str = ""


def rows(out: Path) -> list[ListedRun]:
    return [_row(folder) for folder in runs_in(out)]


def _row(folder: Path) -> ListedRun:
    about = read_about(folder)
    assert about is not None
    state = state_of(folder)
    row = ListedRun(
        name=folder.name,
        folder=folder,
        started=about.started,
        state=state,
        command=_shown(about.command),
        gpu=about.gpu,
        verdict="" if state == "finished" else state,
    )
    prediction = _prediction(folder)
    if prediction is None:
        return row
    fullest = prediction.memory.fullest
    return row.model_copy(
        update={
            "gpus": prediction.world.size,
            "gpu": prediction.cluster.gpu,
            "step_time_s": prediction.step_time_s,
            "memory_bytes": fullest and fullest.peak_reserved_bytes + fullest.outside_allocator_bytes,
            "fits": prediction.memory.fits,
            "verdict": _verdict(prediction),
        }
    )


def _shown(command: list[str]) -> str:
    """A command as it was typed: a bare `python` became the path of an interpreter."""
    first = [Path(command[0]).name] if command and command[0].startswith("/") else command[:1]
    return shlex.join([*first, *command[1:]])


def _prediction(folder: Path) -> Prediction | None:
    try:
        return read_prediction(folder / PREDICTION)
    except MayaError:  # it is still running, was interrupted, or is a block, which predicts when it is asked
        return None


def _verdict(prediction: Prediction) -> str:
    if prediction.memory.fits is False:
        return "does not fit"
    if prediction.failures:
        return "failed"
    if prediction.hangs:
        return "hangs"
    if prediction.memory.fits is None:
        return memory_in_words(prediction.memory) if prediction.memory.depends_on else "not known to fit"
    return "fits"


def table(found: list[ListedRun]) -> Table:
    """The time is shown where names do not begin with it."""
    named = any(not row.name.startswith(f"{row.started:%Y%m%d}") for row in found)
    shown = plain_table("", "run", *(["started"] if named else []), "command", ">GPUs", ">step", ">memory", "")
    for row in found:
        shown.add_row(
            row.name,
            *([f"{row.started:%m-%d %H:%M}"] if named else []),
            row.command,
            f"{row.gpus:,} x {row.gpu}" if row.gpus else row.gpu,
            wording.seconds(row.step_time_s) if row.step_time_s is not None else "-",
            wording.size(row.memory_bytes) if row.memory_bytes is not None else "-",
            row.verdict,
        )
    for column in shown.columns:
        column.no_wrap = column.header not in ("command", "")  # a name must stay one word when it is copied
    return shown
