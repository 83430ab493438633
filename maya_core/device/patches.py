"""Changes to other projects, each remembered so that it can be undone in reverse order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes set and mapping items put while the emulation is on; `undo` leaves everything as it was found."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        before = vars(target).get(name, _ABSENT) if hasattr(target, "__dict__") else getattr(target, name, _ABSENT)
        setattr(target, name, value)
        if before is _ABSENT:
            self._undo.append(lambda: delattr(target, name))
        else:
            self._undo.append(lambda: setattr(target, name, before))

    def put(self, mapping: Any, key: Any, value: Any) -> None:
        before = mapping.get(key, _ABSENT)
        mapping[key] = value
        if before is _ABSENT:
            self._undo.append(lambda: mapping.pop(key, None))
        else:
            self._undo.append(lambda: mapping.__setitem__(key, before))

    def on_undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
