"""A process under `maya run`: emulated from `import torch` on, its trace written when it ends, however it ends."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

from maya_core.launch.settings import VARIABLE, Settings


def emulate_this_process() -> None:
    """Switches the emulation on for the rest of the process, as its environment says."""
    settings = Settings.model_validate_json(os.environ[VARIABLE])
    # A child the program starts (a data loader, a compiler) is not another rank.
    os.environ.pop(VARIABLE)
    from maya_core.errors import MayaError
    from maya_core.launch.emulation import Emulation
    from maya_core.launch.progress import show_progress

    try:
        emulation = Emulation(settings, on_step=show_progress(settings.steps))
    except MayaError as error:
        print(f"maya: {error}", file=sys.stderr)
        os._exit(2)
    owner = os.getpid()
    ended = {"how": "completed"}
    excepthook = sys.excepthook

    def note_failure(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        ended["how"] = "failed"
        excepthook(kind, error, where)

    def finish() -> None:
        if os.getpid() == owner:
            emulation.finish("stopped" if emulation.steps.enough else ended["how"])

    sys.excepthook = note_failure
    atexit.register(finish)
