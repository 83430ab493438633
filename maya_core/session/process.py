"""A process under `maya run`: it is emulated from `import torch` on, and its trace is written when it ends, however it ends."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from maya_core.launch.settings import VARIABLE, ProcessSettings

if TYPE_CHECKING:
    from maya_core.session.emulation import Emulation


MOST_CHARACTERS = 300  # of an error's message
SEED = 67280421310721  # the one that torch's generators on GPUs begin with


class EmulatedProcess:
    """The emulation of this process, and how its program ends."""

    def __init__(self, settings: ProcessSettings) -> None:
        from maya_core.launch.progress import show_progress
        from maya_core.messages import say
        from maya_core.recording import host_weights
        from maya_core.session import gpu_only
        from maya_core.session.emulation import Emulation

        self.owner = os.getpid()
        self.failed = False
        # A job's progress is shown by the command that started it.
        on_step = show_progress(settings.request.steps) if settings.rank is None else None
        self.emulation = Emulation(settings, on_step, owns_process=True)
        seed(settings.rank or 0)
        host_weights.install(self.emulation.device.patches, self.emulation.device.native)
        excepthook = sys.excepthook

        def note_failure(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
            self.failed = True
            self.emulation.failure = _in_words(error, where)
            excepthook(kind, error, where)
            if advice := gpu_only.advice(error):
                say(advice)

        sys.excepthook = note_failure
        atexit.register(self.finish)
        self._record_sudden_end()

    def _record_sudden_end(self) -> None:
        """A program that leaves by os._exit runs no exit handlers, but its trace is written all the same."""
        leave = os._exit

        @functools.wraps(leave)
        def _exit(status: int) -> NoReturn:
            if os.getpid() == self.owner and self.emulation.trace is None:
                self.failed = self.failed or status != 0
                self.emulation.failure = self.emulation.failure or f"it left by os._exit({status})"
                sys.stdout.flush()
                self.finish()
            leave(status)

        self.emulation.device.patches.set(os, "_exit", _exit)

    def finish(self) -> None:
        if os.getpid() == self.owner:
            self.emulation.finish("failed" if self.failed else "completed")


def _in_words(error: BaseException, where: TracebackType | None) -> str:
    """The error, and the program's line that it came from."""
    frames = traceback.extract_tb(where)
    message = " ".join(str(error).split())[:MOST_CHARACTERS]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<")]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


def seed(rank: int) -> None:
    """Seeds the random numbers of the host, which are random otherwise: the same command has to predict the same. Ranks differ, as they do on
    a cluster."""
    import random

    import torch

    random.seed(rank)
    torch.default_generator.manual_seed(SEED + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)


_this: EmulatedProcess | None = None


def emulate_this_process() -> None:
    """Switches the emulation on for the rest of the process, with the settings in its environment."""
    from maya_core.session import children

    settings = ProcessSettings.model_validate_json(os.environ[VARIABLE])
    if not (settings.inherited and children.is_helper()):
        in_this_process(children.settings_here(settings))


def emulation_here() -> Emulation | None:
    """The emulation that this process has had from its start, if it was started with one."""
    return _this.emulation if _this is not None and _this.owner == os.getpid() else None


def in_this_process(settings: ProcessSettings) -> EmulatedProcess:
    """The emulation of this process: the one that is on, or a new one. A fork gets its own."""
    global _this
    from maya_core.errors import MayaError
    from maya_core.session import children

    children.pass_on(settings)
    if _this is not None and _this.owner == os.getpid():
        return _this
    if _this is not None:
        _this.owner = os.getpid()
        _this.emulation.continue_in_fork(settings)
        seed(settings.rank or 0)
        return _this
    try:
        _this = EmulatedProcess(settings)
    except MayaError as error:
        print(f"maya: {error}", file=sys.stderr)
        os._exit(2)
    return _this
