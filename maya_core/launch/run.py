"""`maya run`: starts the user's command with the emulation switched on and reads back what it did."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from maya_core.device.build import native
from maya_core.errors import MayaError
from maya_core.launch.emulation import TRACE_NAME
from maya_core.launch.settings import VARIABLE, Settings
from maya_core.trace.rank import RankTrace, read_trace


@dataclass(frozen=True)
class Run:
    """What a command did on the emulated GPUs."""

    exit_code: int
    traces: list[RankTrace]
    out: Path


def run_command(command: list[str], *, gpu: str, gpus: int, steps: int | None, out: Path) -> Run:
    """Runs the command to its end, or to the end of its last emulated step."""
    program = shutil.which(command[0])
    if program is None:
        raise MayaError(
            f"command not found: '{command[0]}'.",
            "Give the command as you would type it, after `--`: maya run -- python train.py",
        )
    _check_out(out)
    native()  # compile here, once, where its message is seen
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(gpu=gpu, gpus=gpus, steps=steps, out=out.resolve())
    environment = {**os.environ, VARIABLE: settings.model_dump_json()}
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise MayaError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: torch would not load the emulated device.",
            "Unset it and run again.",
        )
    child = subprocess.Popen([program, *command[1:]], env=environment)
    try:
        exit_code = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        exit_code = child.wait()
    path = out / TRACE_NAME.format(rank=0)
    return Run(exit_code if exit_code >= 0 else 128 - exit_code, [read_trace(path)] if path.exists() else [], out)


def _check_out(out: Path) -> None:
    """An earlier run's folder is replaced, anything else of the user's never."""
    if not out.exists():
        return
    if not out.is_dir():
        raise MayaError(f"--out {out} is a file.", "Give a folder for the traces.")
    others = [entry for entry in out.iterdir() if not re.fullmatch(r"rank-\d{5}\.trace(\.part)?", entry.name)]
    if others:
        raise MayaError(
            f"--out {out} holds other files ({others[0].name}).",
            "Give an empty or new folder: traces are not mixed with them.",
        )
    for entry in out.iterdir():
        entry.unlink()


def split_command(arguments: list[str]) -> list[str]:
    """The command after `--`, with the running Python in place of a bare 'python'."""
    if not arguments:
        raise MayaError("no command to run.", "Give it after `--`: maya run --gpu h100 -- python train.py")
    if arguments[0] in ("python", "python3"):
        return [sys.executable, *arguments[1:]]
    if arguments[0].endswith(".py"):
        return [sys.executable, *arguments]
    return arguments
