"""Programs that the emulated program starts: `torchrun` or `python` by subprocess, os.system or os.exec. They belong to the same job.

The settings of the emulation stay in the environment, so every Python that imports torch is emulated, whatever stands between. That alone makes
nothing a part of the job: a child takes part once it joins a process group, starts ranks or finishes a step, and it leaves a trace only if it used
the GPU. The compilers and other helpers that torch itself starts are not emulated.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from maya_core.launch.link import Link
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.launch.torchrun import NAMES
from maya_core.messages import say
from maya_core.patches import Patches
from maya_core.torch_seam.distributed import TORCHRUN_FILE

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # how a launcher tells its processes how many there are on a node
_OURS = "MAYA_"  # variables with settings of Maya, such as its cache and the user's hardware
_FOREIGN = "is a Python without Maya, so what it runs is not emulated. Install Maya there, or start it with the Python of `maya`."


def is_helper() -> bool:
    """Whether this process is one that torch or Maya started for itself, such as a worker of inductor's compiler."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        module = words[1]
        return module not in NAMES and module.partition(".")[0] in ("torch", "maya_core", "maya_mlflow")
    script = os.path.abspath(words[0]) if words and words[0] != "-c" else ""
    if Path(script).name == "maya":  # which starts a run of its own
        return True
    launchers = (TORCHRUN_FILE, str(Path(TORCHRUN_FILE).with_name("launch.py")))
    return script.startswith(f"{torch.__path__[0]}{os.sep}") and script not in launchers


def settings_here(settings: ProcessSettings) -> ProcessSettings:
    """The settings of this process, which has inherited them. A launcher that the program calls may have said how many GPUs there are."""
    local = os.environ.get(LOCAL_WORLD_SIZE, "")
    if settings.inherited and local.isdigit() and int(local) > (settings.gpus or 1):
        return settings.model_copy(update={"gpus": int(local), "ranks_per_node": int(local)})
    return settings


def pass_on(settings: ProcessSettings) -> None:
    """From now on, programs that this process starts are emulated with these settings."""
    os.environ[VARIABLE] = settings.for_programs().model_dump_json()


@contextmanager
def not_passed_on() -> Any:
    """A process that is started inside is not emulated."""
    kept = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ[VARIABLE] = kept


def install(link: Link, only_starts_others: Callable[[], bool], patches: Patches) -> None:
    """`only_starts_others`: whether this process has no part in the job itself, and nobody can wait for it while it waits."""

    def waiting() -> AbstractContextManager[object]:
        here = threading.current_thread() is threading.main_thread()
        works = here and link.takes_part and not link.idles
        return link.waiting() if works and only_starts_others() else nullcontext()

    process = subprocess.Popen
    patches.wrap(process, "__init__", _with_settings)
    patches.wrap(process, "wait", functools.partial(_while, waiting))
    patches.wrap(process, "communicate", functools.partial(_while, waiting))
    patches.wrap(os, "system", functools.partial(_while, waiting))
    patches.wrap(os, "execve", _replaced)


def _while(waiting: Callable[[], AbstractContextManager[object]], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        with waiting():
            return original(*args, **kwargs)

    return wait


def _with_settings(original: Callable[..., None]) -> Callable[..., None]:
    """Popen.__init__, for which a program may make an environment of its own. On a machine with GPUs they would be visible all the same."""

    @functools.wraps(original)
    def __init__(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if options.get("env") is not None:
            options["env"] = _complete(options["env"])
        _tell_foreign(args)
        original(self, args, *rest, **options)

    return __init__


def _replaced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execve(path: Any, argv: Any, env: Any) -> Any:
        return original(path, argv, _complete(env))

    return execve


def _complete(environment: Any) -> Any:
    """An environment with the settings. One that has them keeps its own, and what is no mapping of strings is the callee's to refuse."""
    if VARIABLE not in os.environ or not isinstance(environment, Mapping):
        return environment
    if VARIABLE in environment or VARIABLE.encode() in environment:
        return environment
    ours = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    return {**ours, **environment}


# ---- Pythons that cannot be emulated ----
def _tell_foreign(args: Any) -> None:
    program = args[0] if isinstance(args, list | tuple) and args else args
    if isinstance(program, str) and os.path.isabs(program) and Path(program).name.startswith("python"):
        _tell_once(program)


@functools.cache
def _tell_once(python: str) -> None:
    prefix = Path(python).parent.parent
    if prefix == Path(sys.prefix) or not _has_torch(prefix):
        return
    if not any(prefix.glob("lib/python3*/site-packages/maya_emulator-*")):
        say(f"{python} {_FOREIGN}")


def _has_torch(prefix: Path) -> bool:
    return any(prefix.glob("lib/python3*/site-packages/torch/version.py"))
