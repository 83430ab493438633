"""Supports `deepspeed --emulate train.py`. A .pth file loads this module in every process whose command begins with a word that
contains 'deepspeed', so it checks the command exactly and is cheap to import."""

from __future__ import annotations

import argparse
import sys
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any

from maya_core.patches import Patches
from maya_launchers import flags

PROGRAMS = ("deepspeed", "deepspeed.pt")  # the same script, under two names


def is_launcher(command: list[str]) -> bool:
    script = next((word for word in command[1:4] if not word.startswith("-")), "")
    return PurePath(script).name in PROGRAMS


def requested_world(command: list[str]) -> tuple[int | None, int | None]:
    """The nodes, and the GPUs of each, that a `deepspeed` command requests."""
    return flags.number_after(command, "--num_nodes"), flags.number_after(command, "--num_gpus")


class Parser(argparse.ArgumentParser):
    """DeepSpeed's parser with Maya's flags. The original is a local variable of a function."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        flags.add_to(self)
        found = super().parse_args(args, namespace)
        if found.emulate and not flags.emulated():
            flags.run_under_maya(found, len(found.user_args))
        if (alone := flags.alone(found)) is not None:
            self.error(f"{alone} needs --emulate")
        for name in ("emulate", *flags.names()):  # the rest belongs to DeepSpeed
            delattr(found, name)
        return found


def add_flags(patches: Patches, runner: ModuleType) -> None:
    patches.set(runner, "argparse", SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser}))


if is_launcher(sys.orig_argv):
    flags.watch("deepspeed.launcher.runner", add_flags)
