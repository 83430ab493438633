"""Finds out from the source of a Triton kernel which parameters it reads and writes, by following the arguments of `tl.load`, `tl.store`
and atomics back to the parameters.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

ATOMICS = ("atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg", "atomic_and", "atomic_or", "atomic_xor")  # fmt: skip
READS = ("load", *ATOMICS)
WRITES = ("store", *ATOMICS)
LOOPS = (ast.For, ast.While)


class Use(NamedTuple):
    """What a kernel does to its parameters, by name."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    gathers: frozenset[str] = frozenset()  # read or written only at addresses that were loaded, and not in a loop
    multiplies: bool = False  # matrices (tl.dot)
    adds: bool = False  # atomically
    rereads: int = 0  # how many loops load the same parameter, after the first


@functools.cache
def use_of(function: Any) -> Use:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return Use()
    return _Reader(set(inspect.signature(function).parameters)).read(tree)


class _Reader:
    """Follows names from parameters through assignments to loads and stores."""

    def __init__(self, parameters: set[str]) -> None:
        self.parameters = parameters
        self.comes_from: dict[str, set[str]] = {name: {name} for name in parameters}
        self.loaded: set[str] = set()  # names of values that were loaded, or computed from such values

    def read(self, tree: ast.AST) -> Use:
        for _ in range(2):  # a pointer that is moved in a loop is used before the line that moves it
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                    self._assign(node)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        reads, writes, direct = self._touched(calls, READS), self._touched(calls, WRITES), set[str]()
        for call in calls:
            if _named(call, READS + WRITES) and not self._looked_up(call.args[0]):
                direct |= self._sources(call.args[0])
        loops = [node for node in ast.walk(tree) if isinstance(node, LOOPS)]
        return Use(
            reads=frozenset(reads),
            writes=frozenset(writes),
            gathers=frozenset() if loops else frozenset((reads | writes) - direct),
            multiplies=any(_named(call, ("dot", "dot_scaled")) for call in calls),
            adds=any(_named(call, ("atomic_add",)) for call in calls),
            rereads=max(0, self._most_loops(loops) - 1),
        )

    def _assign(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> None:
        assert node.value is not None
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_loaded = _calls(node.value, READS)
        for name in (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)):
            # A loaded value is a number, and no longer an address.
            self.comes_from.setdefault(name, set()).update(set() if is_loaded else self._sources(node.value))
            if is_loaded or self._looked_up(node.value):
                self.loaded.add(name)

    def _sources(self, node: ast.AST) -> set[str]:
        return set().union(*(self.comes_from.get(name, set()) for name in _names(node)))

    def _looked_up(self, node: ast.AST) -> bool:
        return _calls(node, READS) or not self.loaded.isdisjoint(_names(node))

    def _touched(self, calls: list[ast.Call], names: tuple[str, ...]) -> set[str]:
        found = (self._sources(call.args[0]) for call in calls if _named(call, names))
        return set().union(*found) & self.parameters

    def _most_loops(self, loops: Sequence[ast.AST]) -> int:
        """The largest number of loops that load the same parameter. A nested loop counts as part of the outer one."""
        inner = {id(one) for loop in loops for one in ast.walk(loop) if one is not loop and isinstance(one, LOOPS)}
        counted: Counter[str] = Counter()
        for loop in loops:
            if id(loop) not in inner:
                calls = [one for one in ast.walk(loop) if isinstance(one, ast.Call) and one.args]
                counted.update(self._touched([call for call in calls if not self._looked_up(call.args[0])], ("load",)))
        return max(counted.values(), default=0)


def _names(node: ast.AST) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]


def _named(call: ast.Call, names: tuple[str, ...]) -> bool:
    return getattr(call.func, "attr", getattr(call.func, "id", "")) in names


def _calls(node: ast.AST, names: tuple[str, ...]) -> bool:
    return any(isinstance(one, ast.Call) and _named(one, names) for one in ast.walk(node))
