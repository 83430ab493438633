"""Stores a run on disk before anything is sent to MLflow. If the server fails, nothing is lost, and the run can be sent later.

maya-mlflow/predicted-3f9a0c12d4e5/run.json, artifacts/...
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maya_core.errors import MayaError
from maya_mlflow.keys import Kind

FOLDER = "maya-mlflow"  # in the working directory
FOLDER_VARIABLE = "MAYA_MLFLOW_FOLDER"
RUN = "run.json"
ARTIFACTS = "artifacts"
LOG = "sending.log"
ELSEWHERE = "--elsewhere"  # the run goes to another server than intended, whose experiments have other ids


class Draft(BaseModel):
    """The content of run.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["maya-mlflow-run"] = "maya-mlflow-run"
    version: Literal[1] = 1
    kind: Kind
    upload_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12])
    name: str
    tracking_uri: str | None = None  # None: MLflow's own configuration at the time of sending
    experiment: str | None = None  # the same
    experiment_id: str | None = None
    parent_run_id: str | None = None
    run_id: str | None = None  # an existing run to log to, if requested; it is neither started nor ended
    status: Literal["FINISHED", "FAILED"] = "FINISHED"
    started_ms: int = Field(default_factory=lambda: int(time.time() * 1000))
    ended_ms: int = Field(default_factory=lambda: int(time.time() * 1000))
    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


def new_folder(draft: Draft) -> Path:
    """Creates the folder of a draft, which nothing else writes to."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, FOLDER)) / f"{draft.kind}-{draft.upload_id}"
    (folder / ARTIFACTS).mkdir(parents=True)
    return folder


def write(draft: Draft, folder: Path) -> None:
    """Writes run.json. It must be written last: a folder that has it is complete."""
    kept = draft.model_copy(update={"tracking_uri": without_password(draft.tracking_uri)})
    part = folder / (RUN + ".part")
    part.write_text(kept.model_dump_json(indent=2) + "\n")
    part.replace(folder / RUN)


def read(folder: Path) -> Draft:
    try:
        return Draft.model_validate_json((folder / RUN).read_text())
    except FileNotFoundError as error:
        raise MayaError(
            f"{folder} does not contain a run to upload: it has no {RUN}.",
            f"Stored runs are in folders below {FOLDER}/. A folder is removed when its run has been uploaded.",
        ) from error
    except (OSError, ValidationError) as error:
        raise MayaError(f"{folder / RUN} cannot be read: {str(error).splitlines()[0]}", "Predict again.") from error


def remove(folder: Path) -> None:
    """Removes a draft that has been sent."""
    shutil.rmtree(folder)
    if folder.parent.name == FOLDER and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def without_password(uri: str | None) -> str | None:
    return None if uri is None else re.sub(r"(?<=://)[^/@\s]+@", "", uri)
