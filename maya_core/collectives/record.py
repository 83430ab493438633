"""The tables behind a rank's collectives: communicators, distinct calls, and the call stacks they were made from."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType

from maya_core.trace.communication import CollectiveCall, Communicator, Frame, Site


class CollectiveRecord:
    """Numbers communicators, calls and call sites as they are first seen."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.communicators: list[Communicator] = []
        self._calls: dict[CollectiveCall, int] = {}
        self._sites: dict[tuple[tuple[CodeType, int], ...], int] = {}

    @property
    def calls(self) -> list[CollectiveCall]:
        return list(self._calls)

    @property
    def sites(self) -> list[Site]:
        return [tuple(_frame(code, instruction) for code, instruction in reversed(key)) for key in self._sites]

    def communicator(self, backend: str, name: str, ranks: list[int], rank: int) -> int:
        self.communicators.append(Communicator(backend, name, tuple(ranks), rank))
        return len(self.communicators) - 1

    def note(self, call: CollectiveCall) -> tuple[int, int]:
        """The number of the call, and of the place in the program that makes it now."""
        key = tuple(_stack())
        return self._calls.setdefault(call, len(self._calls)), self._sites.setdefault(key, len(self._sites))


def _stack() -> list[tuple[CodeType, int]]:
    """The calling stack, innermost first. Autograd's threads go on below the main one, which is in backward()."""
    stack = _walk(sys._getframe(1))
    main = threading.main_thread().ident
    if threading.get_ident() != main and main is not None:
        stack += _walk(sys._current_frames().get(main))
    return stack


def _walk(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    stack = []
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("maya_core.collectives"):
            stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return stack


def _frame(code: CodeType, instruction: int) -> Frame:
    line = next(
        (line for start, end, line in code.co_lines() if start <= instruction < end and line), code.co_firstlineno
    )
    return Frame(code.co_filename, line, code.co_qualname)
