"""The flags themselves, the same on every launcher, and what `--emulate` does: the command as it was typed, under `maya run`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from typing import NoReturn

OPTIONS = {"emulate_gpu": "--gpu", "emulate_steps": "--steps", "emulate_out": "--out"}  # as `maya run` has them
SWITCHES = {"emulate_mlflow": "--mlflow"}  # the same, without a value


def add_to(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Maya Arguments", "Emulate the launch on GPUs that are not there.")
    # One without a value: with an optional one it would take the training script for it.
    group.add_argument(
        "--emulate", action="store_true", help="Predict step time, memory and cost on emulated GPUs (`maya run`)."
    )
    told = {
        "gpu": ("GPU", "Which GPU; `maya gpus` lists them. Default h100."),
        "steps": ("N", "Optimizer steps to emulate, or 'all'. Default 3."),
        "out": ("DIR", "Folder for the prediction. Default maya-out."),
    }
    for name, (value, what) in told.items():
        group.add_argument(f"--emulate-{name}", f"--emulate_{name}", metavar=value, help=what)
    group.add_argument(
        "--emulate-mlflow",
        "--emulate_mlflow",
        action="store_true",
        default=None,
        help="Log the prediction to MLflow as a run, by MLflow's own configuration.",
    )


def run_under_maya(args: Namespace, script_arguments: int) -> NoReturn:
    """This process becomes `maya run` of its own command. The last so many words are the training script's."""
    options = [word for name, flag in OPTIONS.items() if getattr(args, name) for word in (flag, getattr(args, name))]
    options += [flag for name, flag in SWITCHES.items() if getattr(args, name)]
    command = without_flags(sys.orig_argv, script_arguments)
    maya = [sys.executable, "-c", "from maya_core.cli import entry; entry()"]
    sys.stdout.flush()
    os.execv(sys.executable, [*maya, "run", *options, "--", sys.executable, *command[1:]])


def without_flags(command: list[str], script_arguments: int) -> list[str]:
    """The command without Maya's flags. What comes after the training script is the script's own."""
    head = command[: len(command) - script_arguments]
    kept, value_follows = [], False
    for word in head:
        name, equals, _ = word.partition("=")
        ours = name.startswith("--") and name[2:].replace("-", "_") in ("emulate", *SWITCHES, *OPTIONS)
        if not ours and not value_follows:
            kept.append(word)
        value_follows = ours and not equals and name[2:].replace("-", "_") in OPTIONS
    return kept + command[len(head) :]


def alone(args: Namespace) -> str | None:
    """A flag that says how to emulate, where that is not asked for, as it is typed; None if there is none."""
    given = (name for name in (*OPTIONS, *SWITCHES) if not args.emulate and getattr(args, name) is not None)
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def emulated() -> bool:
    """This process runs under `maya run` already."""
    process = sys.modules.get("maya_core.session.process")
    return process is not None and process.emulation_here() is not None
