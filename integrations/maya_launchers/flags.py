"""Defines the flags, which are the same for every launcher. `--emulate` runs the command as it was typed under `maya run`.

Every option of `maya run` has a flag: `--emulate-gpu` for `--gpu`, `--emulate-steps` for `--steps`, and so on.
"""

from __future__ import annotations

import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

from maya_core.patches import MissingName, Patches

PREFIX = "emulate_"


def watch(launcher: str, add_flags: Callable[[Patches, ModuleType], None]) -> None:
    """Adds the flags once the launcher's module is imported. A version in which they cannot be added must still launch programs."""
    patches = Patches()

    def add(module: ModuleType) -> None:
        try:
            add_flags(patches, module)
        except (MissingName, AttributeError) as error:
            if "--emulate" in sys.orig_argv:
                raise SystemExit(f"maya: --emulate does not work with this version of the launcher: {error}") from error

    patches.when_imported(launcher, add)


@functools.cache
def _options() -> dict[str, tuple[str, str | None]]:
    """The options of `maya run` by the name of their flag: the help text, and the name of the value, or None for a switch."""
    from maya_core.request import Request, is_switch, options_of, tracker_options_shown

    every = [*options_of(Request), *tracker_options_shown()]
    return {
        f"{PREFIX}{name}": (shown.help, None if is_switch(field) else shown.metavar or name.upper())
        for name, field, shown in every
    }


def names() -> list[str]:
    return list(_options())


def add_to(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Maya Arguments", "Emulate the launch on GPUs that do not exist.")
    # A flag without a value: an optional value would consume the training script.
    group.add_argument(
        "--emulate", action="store_true", help="Predict step time, memory and cost on emulated GPUs (`maya run`)."
    )
    for name, (help, value) in _options().items():
        flags = (f"--{name.replace('_', '-')}", f"--{name}") if "_" in name else (f"--{name}",)
        text = help.replace("%", "%%")
        if value is None:
            group.add_argument(*flags, action="store_true", default=None, help=text)
        else:
            group.add_argument(*flags, metavar=value, help=text)


def run_under_maya(args: Namespace, script_arguments: int) -> NoReturn:
    """Replaces this process by `maya run` of its own command. The last words belong to the training script."""
    options = []
    for name, (_, value) in _options().items():
        given = getattr(args, name)
        if given:
            flag = f"--{name.removeprefix(PREFIX).replace('_', '-')}"
            options += [flag] if value is None else [flag, given]
    command = without_flags(sys.orig_argv, script_arguments)
    maya = [sys.executable, "-c", "from maya_core.cli import entry; entry()"]
    sys.stdout.flush()
    os.execv(sys.executable, [*maya, "run", *options, "--", sys.executable, *command[1:]])


def without_flags(command: list[str], script_arguments: int) -> list[str]:
    """The command without Maya's flags. What follows the training script belongs to the script."""
    head = command[: len(command) - script_arguments]
    kept, value_follows = [], False
    for word in head:
        flag, equals, _ = word.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        ours = name == "emulate" or name in _options()
        if not ours and not value_follows:
            kept.append(word)
        value_follows = ours and not equals and name != "emulate" and _options()[name][1] is not None
    return kept + command[len(head) :]


def alone(args: Namespace) -> str | None:
    """One of Maya's flags that was given without --emulate, as it is typed; None if there is none."""
    given = (name for name in names() if not args.emulate and getattr(args, name) is not None)
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def emulated() -> bool:
    """Whether this process already runs under `maya run`."""
    process = sys.modules.get("maya_core.session.process")
    return process is not None and process.emulation_here() is not None


def number_after(command: list[str], flag: str) -> int | None:
    """The number that a command gives for a flag, as `--flag 8` or `--flag=8`."""
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == flag:
            text = value if equals else "".join(command[place + 1 : place + 2])
            return int(text) if text.isdigit() else None
    return None
