"""The tables of one rank's collectives: communicators, distinct calls, and the call stacks that made them."""

from __future__ import annotations

from types import CodeType

from maya_core.trace.communication import CollectiveCall, Communicator, Frame, Site


class CollectiveRecord:
    """Numbers communicators, calls and call sites in the order in which they first occur."""

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

    def call(self, call: CollectiveCall) -> int:
        return self._calls.setdefault(call, len(self._calls))

    def site(self, stack: tuple[tuple[CodeType, int], ...]) -> int:
        """The number of a place in the program, identified by its call stack with the innermost frame first."""
        return self._sites.setdefault(stack, len(self._sites))


def _frame(code: CodeType, instruction: int) -> Frame:
    line = next(
        (line for start, end, line in code.co_lines() if start <= instruction < end and line), code.co_firstlineno
    )
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 does not know the class of a method
    return Frame(code.co_filename, line, name)
