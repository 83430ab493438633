"""Records for the trace what torch.compile did: graphs, graph breaks, recompilations with their reasons, failures, and the time it took.

That time is the emulating host's. It is shown as progress, and no prediction includes it.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from maya_core.messages import say
from maya_core.patches import Patches
from maya_core.torch_compile.dynamo import OURS
from maya_core.torch_seam import compile as seam

LIMIT = "recompile limit"


class CompileRecord:
    """Collects dynamo's own metrics; `found` reads them. `step` returns the number of the current step."""

    def __init__(self, step: Callable[[], int], patches: Patches) -> None:
        self.seconds = 0.0
        self.in_steps: set[int] = set()
        self._step = step
        self._depth = 0
        self._graphs = 0
        seam.INSTALL_CALLBACKS.wrap(patches, self._watching)
        seam.forget_graph_breaks(patches)
        seam.COMPILATION_METRICS.replace(
            patches, collections.deque()
        )  # dynamo's own keeps only the last 64, and earlier ones too

    def _watching(self, install: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def install_callbacks(self_: Any, trigger: Any, compile_id: str) -> Iterator[None]:
            with install(self_, trigger, compile_id), self._timed(compile_id):
                yield

        return install_callbacks

    @contextmanager
    def _timed(self, compile_id: str) -> Iterator[None]:
        """Adds the time to `seconds`. A compilation may start others; only the outermost counts."""
        began = time.monotonic()
        self._depth += 1
        self.in_steps.add(self._step())
        if self._depth == 1:
            self._show(compile_id)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.monotonic() - began

    def _show(self, compile_id: str) -> None:
        if self._graphs == 0 and not sys.stderr.isatty():
            say("torch.compile generates kernels; they are cached for the next run")
        elif sys.stderr.isatty():
            sys.stderr.write(f"\rmaya: torch.compile compiles graph {compile_id}, {self.seconds:.0f} s so far ")
            sys.stderr.flush()
        self._graphs += 1

    def found(self) -> dict[str, Any] | None:
        """The `compiled` entry of the trace; None if nothing was compiled."""
        dynamo = seam.dynamo_utils()
        metrics = dynamo.get_compilation_metrics() if dynamo else []
        if dynamo is None or not metrics:
            return None
        frames = [one for one in metrics if one.co_name is not None or one.fail_reason]
        return {
            "graphs": sum(bool(one.has_guarded_code and one.graph_op_count) for one in frames),
            "seconds": round(self.seconds, 3),
            "in_steps": sorted(self.in_steps),
            "graph_breaks": _breaks(dynamo),
            "recompiles": _recompiles(frames),
            "failed": _failed(frames),
        }


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].strip() if text.strip() else ""


def _frame(metric: Any) -> str:
    return f"{metric.co_name} ({metric.co_filename}:{metric.co_firstlineno})"


def _breaks(dynamo: ModuleType) -> list[dict[str, Any]]:
    """Where graphs end early, and why. Each place is listed once."""
    found: dict[tuple[str, str], int] = {}
    for one in dynamo.graph_break_reasons:
        if one.graph_break and OURS not in one.reason:
            place = one.user_stack[-1] if one.user_stack else None
            where = f"{place.filename}:{place.lineno}" if place else ""
            found[where, _first_line(one.reason)] = found.get((where, _first_line(one.reason)), 0) + 1
    return [{"where": where, "reason": reason, "times": times} for (where, reason), times in found.items()]


def _recompiles(frames: list[Any]) -> list[dict[str, Any]]:
    """What was compiled more than once, how often, and the reason of the last recompilation."""
    again: dict[str, list[str]] = {}
    for one in frames:
        if one.co_name is not None and one.recompile_reason:
            again.setdefault(_frame(one), []).append(_first_line(one.recompile_reason.partition(": ")[2]))
    return [
        {"function": frame, "times": len(reasons), "reason": reasons[-1].partition("#")[0].strip() or reasons[-1]}
        for frame, reasons in again.items()
    ]


def _failed(frames: list[Any]) -> list[dict[str, Any]]:
    """What torch runs uncompiled, because it could not be compiled or had to be recompiled too often."""
    names = {one.compile_id.split("/")[0]: _frame(one) for one in frames if one.co_name and one.compile_id}
    found = {}
    for one in frames:
        if one.fail_reason:
            frame = _frame(one) if one.co_name else names.get((one.compile_id or "").split("/")[0], "")
            found[frame, _first_line(one.fail_reason)] = one.fail_type or ""
    return [{"function": frame, "reason": reason, "error": error} for (frame, reason), error in found.items()]
