"""Changes to other projects, each remembered so that it can be undone in reverse order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT = object()


class _ImportWatch(MetaPathFinder):
    """Finds what the others find, and adds an action to the loading of one module."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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

    def when_imported(self, name: str, action: Callable[[ModuleType], None]) -> None:
        """Runs the action on the module of that name: now if it is there, else when the program imports it."""
        if name in sys.modules:
            action(sys.modules[name])
            return
        finder = _ImportWatch(name, action)
        sys.meta_path.insert(0, finder)
        self._undo.append(lambda: sys.meta_path.remove(finder))

    def on_undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
