"""Monkey patches of other projects. Each change is remembered, and all are undone in reverse order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT = object()


Action = Callable[[ModuleType], None]


class _ImportWatch(MetaPathFinder):
    """An import hook: finds modules through the other finders, and runs actions once certain modules are loaded."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}  # by the module's name

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.actions.get(name, ())[:]:
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Loading(ModuleSpec):
    """The spec of a module that is being executed now, for example one that imports torch in its first lines. The import system
    sets `_initializing` to False when the module is complete; then the actions run."""

    actions: list[Action]

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value and self.name in sys.modules:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for action in self.actions:
                action(sys.modules[self.name])


class Patches:
    """Attributes and mapping items that are changed during an emulation; `undo` restores every one."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._watch: _ImportWatch | None = None

    def set(self, target: Any, name: str, value: Any) -> None:
        before = vars(target).get(name, _ABSENT) if hasattr(target, "__dict__") else getattr(target, name, _ABSENT)
        setattr(target, name, value)
        if before is _ABSENT:
            self._undo.append(lambda: delattr(target, name))
        else:
            self._undo.append(lambda: setattr(target, name, before))

    def put(self, mapping: Any, key: Any, value: Any) -> None:
        self.keep(mapping, key)
        mapping[key] = value

    def keep(self, mapping: Any, key: Any) -> None:
        """Restores this item on `undo`, whatever the program does with it until then."""
        before = mapping.get(key, _ABSENT)
        if before is _ABSENT:
            self._undo.append(lambda: mapping.pop(key, None))
        else:
            self._undo.append(lambda: mapping.__setitem__(key, before))

    def when_imported(self, name: str, action: Action) -> None:
        """Runs the action on the module of that name: now if it is loaded, otherwise when the program imports it."""
        if name in sys.modules:
            spec: Any = getattr(sys.modules[name], "__spec__", None)
            if not getattr(spec, "_initializing", False):
                action(sys.modules[name])
                return
            if not isinstance(spec, _Loading):
                spec.__class__ = _Loading
                spec.actions = []
            spec.actions.append(action)
            self._undo.append(lambda: spec.actions.remove(action))
            return
        if self._watch is None:
            self._watch = _ImportWatch()
            sys.meta_path.insert(0, self._watch)
            self._undo.append(self._stop_watching)
        self._watch.actions.setdefault(name, []).append(action)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            sys.meta_path.remove(self._watch)
            self._watch.actions.clear()
            self._watch = None

    def on_undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
