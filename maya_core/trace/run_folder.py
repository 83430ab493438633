"""The folder of a run. Every run has one of its own below the folder that the user gave (`--out`), so that two runs never meet, and nothing
of an earlier run is overwritten:

    maya-out/20261119-222401-train     run.json, the traces, job.json, prediction.json
    maya-out/latest                    points to the newest run that left a job

A run holds a lock in its folder while it lasts. What the files of a job contain is `job.py`'s.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ValidationError

from maya_core.errors import MayaError
from maya_core.version import __version__

DEFAULT_OUT = Path("maya-out")
ABOUT = "run.json"  # written first
MANIFEST = "job.json"  # written when the job's traces are complete
LATEST = "latest"
LOCK = "lock"

State = Literal["running", "finished", "unfinished"]


class About(BaseModel):
    """run.json: what is known about a run when it begins."""

    format: Literal["maya-run"] = "maya-run"
    started: datetime
    command: list[str]  # without secrets
    gpu: str = ""
    maya: str = __version__


@dataclass(frozen=True)
class RunFolder:
    """A run's own folder, locked until `release`."""

    path: Path
    _lock: IO[bytes]

    def release(self) -> None:
        """Ends the run. If it left a job, `latest` points to it from now on."""
        self._lock.close()
        (self.path / LOCK).unlink(missing_ok=True)
        if not (self.path / MANIFEST).exists():
            return
        latest, aside = self.path.parent / LATEST, self.path / f".{LATEST}"
        if latest.is_symlink() or not latest.exists():
            with suppress(OSError):  # a file system without links: `find_run` then looks for the newest run
                aside.symlink_to(self.path.name)
                os.replace(aside, latest)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def new_run(out: Path, command: Sequence[str], gpu: str, name: str | None = None) -> RunFolder:
    """Creates a folder for a run of this command (without secrets) below `out`."""
    started = datetime.now().astimezone()
    if out.exists() and not out.is_dir():
        raise MayaError(f"--out {out} is a file.", "Give a folder; every run gets a folder of its own in it.")
    out.mkdir(parents=True, exist_ok=True)
    folder = _named(out, name) if name is not None else _numbered(out / f"{started:%Y%m%d-%H%M%S}-{_label(command)}")
    lock = (folder / LOCK).open("wb")
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    about = About(started=started, command=list(command), gpu=gpu)
    (folder / ABOUT).write_text(about.model_dump_json(indent=2) + "\n")
    return RunFolder(folder, lock)


def check_name(name: str) -> None:
    """Refuses a name that could not be a folder of its own."""
    if not re.fullmatch(r"[\w][\w.-]*", name) or name == LATEST:
        raise MayaError(
            f"--name {name} cannot be a run's name.",
            f"Use letters, digits, '-', '_' and '.', but not '{LATEST}': that is always the newest run.",
        )


def _named(out: Path, name: str) -> Path:
    check_name(name)
    try:
        (out / name).mkdir()
    except FileExistsError:
        raise MayaError(
            f"{out / name} exists, and runs are never overwritten.",
            "Give another --name, or remove that folder.",
        ) from None
    return out / name


def _numbered(wanted: Path) -> Path:
    """A new folder of that name; with a number if another run was as fast."""
    number, folder = 1, wanted
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        else:
            return folder


def _label(command: Sequence[str]) -> str:
    """The program of a command in one word: `train` for `torchrun --nproc-per-node 8 train.py`."""
    modules = [word for before, word in pairwise(command) if before == "-m"]
    scripts = [Path(word).stem for word in command if word.endswith((".py", ".sh"))]
    found = next(iter([*scripts, *reversed(modules), *(Path(word).name for word in command[:1])]), "")
    return re.sub(r"[^\w.-]+", "-", found).strip("-.")[:40] or "run"


def find_run(given: Path) -> Path:
    """The folder of the run that a user means: a run's folder, a folder of runs (its newest), or the name of a run in `maya-out`."""
    if not given.exists() and len(given.parts) == 1 and (DEFAULT_OUT / given).is_dir():
        given = DEFAULT_OUT / given
    latest = given / LATEST
    if latest.is_symlink() and latest.is_dir():
        return given / latest.readlink()
    finished = [folder for folder in runs_in(given) if state_of(folder) == "finished"]
    return finished[-1] if finished and not (given / MANIFEST).exists() else given


def runs_in(out: Path) -> list[Path]:
    """The folders of all runs in a folder, the oldest first."""
    found = [(about.started, folder) for folder in _folders(out) if (about := read_about(folder)) is not None]
    return [folder for _, folder in sorted(found)]


def _folders(out: Path) -> list[Path]:
    if not out.is_dir():
        return []
    return [folder for folder in sorted(out.iterdir()) if folder.is_dir() and not folder.is_symlink()]


def read_about(folder: Path) -> About | None:
    """What a run's folder says about it; None if it is no such folder."""
    try:
        return About.model_validate_json((folder / ABOUT).read_text())
    except (OSError, ValidationError, UnicodeDecodeError):
        return None


def state_of(folder: Path) -> State:
    if is_running(folder):
        return "running"
    return "finished" if (folder / MANIFEST).exists() else "unfinished"


def is_running(folder: Path) -> bool:
    """Whether somebody holds the run's lock."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def keep_newest(out: Path, count: int) -> list[Path]:
    """Removes all runs but the newest `count`, and those that are running. Returns what was removed."""
    old = [folder for folder in runs_in(out)[: -count or None] if not is_running(folder)]
    for folder in old:
        shutil.rmtree(folder)
    latest = out / LATEST
    if latest.is_symlink() and not latest.exists():
        latest.unlink()
    return old
