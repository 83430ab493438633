from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from maya_mlflow import upload
from maya_mlflow.draft import remove
from maya_mlflow.send import send
from maya_mlflow.upload import Sent
from mlflow_here import HARDWARE, QUIET, server


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="session")
def uri(server_folder: Path) -> Iterator[str]:
    """A real server."""
    with server(server_folder) as address:
        yield address


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory, profiles and hardware of its own, and none of this machine's settings of MLflow."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "hardware.toml").write_text(HARDWARE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MAYA_PROFILES", str(folder / "profiles"))
        patch.setenv("MAYA_HARDWARE", str(folder / "hardware.toml"))
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"):
            patch.delenv(name, raising=False)
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture(scope="module")
def sent_here() -> Iterator[None]:
    """Runs are sent by this process, in which MLflow is imported already: a process for each takes seconds."""

    def send_here(folder: Path, uri: str | None = None) -> Sent:
        told: list[dict[str, object]] = []
        send(folder, told.append, uri)
        remove(folder)
        return Sent(str(told[-1]["done"]), str(told[-1]["experiment"]), str(told[-1]["uri"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "upload", send_here)
        yield
