"""Monkey patches of other projects. Each change is remembered, and all are undone in reverse order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from maya_core.errors import MayaError

_ABSENT = object()


class MissingName(MayaError):
    """Another project no longer has a name that Maya replaces: it was renamed or removed in the installed version."""

    def __init__(self, target: Any, name: str) -> None:
        self.where = f"{_called(target)}.{name}"
        self.project = self.where.partition(".")[0]
        super().__init__(
            f"{self.project} {version_of(self.project)} has no {self.where}, which Maya replaces.",
            f"Install a version of {self.project} that Maya was checked on (`maya help versions`), or update Maya.",
        )


def _called(target: Any) -> str:
    """A module's or class's full name, as a message shows it."""
    if isinstance(target, ModuleType):
        return target.__name__
    owner = target if isinstance(target, type) else type(target)
    return f"{owner.__module__}.{owner.__qualname__}"


def version_of(project: str) -> str:
    """The installed version of a project; that of its module, if the project has another name or was not installed but found."""
    try:
        return version(project)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(project), "__version__", "(version unknown)"))


def first_of(target: Any, *names: str) -> Any:
    """What has the first of these names that exists: a project has renamed it."""
    for name in names:
        if hasattr(target, name):
            return getattr(target, name)
    raise MissingName(target, names[0])


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
        """Replaces an attribute. Raises `MissingName` if there is none of that name: a patch that replaces nothing would go unnoticed."""
        if not hasattr(target, name):
            raise MissingName(target, name)
        self.add(target, name, value)

    def wrap(self, target: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replaces a function or method by `wrapper(function)`. A class method or static method remains one."""
        if not hasattr(target, name):
            raise MissingName(target, name)
        kept = vars(target).get(name, getattr(target, name))
        bound = type(kept) if isinstance(kept, classmethod | staticmethod) else None
        wrapped = wrapper(kept.__func__ if bound else kept)
        self.add(target, name, bound(wrapped) if bound else wrapped)

    def add(self, target: Any, name: str, value: Any) -> None:
        """Sets an attribute that may be missing, such as the CUDA functions of a CPU build of torch."""
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
