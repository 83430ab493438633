"""Supports `accelerate launch --emulate train.py`. A .pth file loads this module in every process whose command begins with a word
that contains 'accelerate', so it checks the command exactly and is cheap to import."""

from __future__ import annotations

import functools
import itertools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any

from maya_core.patches import Patches
from maya_launchers import flags

PROGRAMS = ("accelerate", "accelerate-launch")
MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")


def is_launcher(command: list[str]) -> bool:
    words = command[1:4]
    return any(PurePath(word).name in PROGRAMS for word in words) or any(
        flag == "-m" and name in MODULES for flag, name in itertools.pairwise(words)
    )


def requested_world(command: list[str]) -> tuple[int | None, int | None]:
    """The machines, and the processes on each, that a command of `accelerate launch` requests."""
    machines, processes = flags.number_after(command, "--num_machines"), flags.number_after(command, "--num_processes")
    return machines, processes // (machines or 1) if processes else None


def add_flags(patches: Patches, launch: ModuleType) -> None:
    patches.set(launch, "launch_command_parser", _with_flags(launch.launch_command_parser))
    patches.set(launch, "launch_command", _under_maya(launch.launch_command))


def _with_flags(original: Callable[..., ArgumentParser]) -> Callable[..., ArgumentParser]:
    @functools.wraps(original)
    def launch_command_parser(subparsers: Any = None) -> ArgumentParser:
        parser = original(subparsers)
        flags.add_to(parser)
        return parser

    return launch_command_parser


def _under_maya(original: Callable[[Namespace], Any]) -> Callable[[Namespace], Any]:
    @functools.wraps(original)
    def launch_command(args: Namespace) -> Any:
        if (alone := flags.alone(args)) is not None:
            raise SystemExit(f"accelerate launch: error: {alone} needs --emulate")
        if not args.emulate or flags.emulated():
            return original(args)
        flags.run_under_maya(args, len(args.training_script_args))

    return launch_command


if is_launcher(sys.orig_argv):
    flags.watch("accelerate.commands.launch", add_flags)
