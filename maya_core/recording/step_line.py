"""`--step-at FILE:LINE`: a step ends whenever the program comes to that line.

Python tells when a line is about to run: with sys.monitoring, which costs nothing elsewhere, or before Python 3.12 with a trace function, which
costs a little for every call. The line has to begin a statement.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from maya_core.patches import Patches

_TOOL = 4  # of sys.monitoring's numbers, one that no debugger, profiler or coverage tool has


class StepLine:
    """Calls `mark` at the line."""

    def __init__(self, place: str, mark: Callable[[], None]) -> None:
        file, _, line = place.rpartition(":")
        self._file, self._line, self._mark = file.removeprefix("./"), int(line), mark
        self.reached = False

    def install(self, patches: Patches) -> None:
        if sys.version_info >= (3, 12):
            self._monitor(patches)
            return
        before = sys.gettrace()
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # those that run already
            if self._is_file(frame.f_code):
                frame.f_trace = self._on_line
            frame = frame.f_back
        sys.settrace(self._on_call)
        patches.on_undo(lambda: sys.settrace(before))

    def _is_file(self, code: CodeType) -> bool:
        return code.co_filename == self._file or code.co_filename.endswith(os.sep + self._file)

    def _reach(self) -> None:
        self.reached = True
        self._mark()

    # ---- before Python 3.12 ----
    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_line if self._is_file(frame.f_code) else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_lineno == self._line:
            self._reach()
        return self._on_line

    # ---- since Python 3.12 ----
    def _monitor(self, patches: Patches) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        monitoring.use_tool_id(_TOOL, "maya --step-at")
        monitoring.register_callback(_TOOL, monitoring.events.LINE, self._on_monitored_line)
        monitoring.set_events(_TOOL, monitoring.events.LINE)
        patches.on_undo(lambda: monitoring.free_tool_id(_TOOL))
        patches.on_undo(lambda: monitoring.set_events(_TOOL, 0))

    def _on_monitored_line(self, code: CodeType, line: int) -> Any:
        if line == self._line and self._is_file(code):
            self._reach()
            return None
        return sys.monitoring.DISABLE  # type: ignore[attr-defined, unused-ignore]
