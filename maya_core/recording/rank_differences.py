"""Finds out, from the sources of a program, whether its ranks do different work: `if rank == 3`, `64 if rank % 2 == 0 else 8`,
`range(10 - rank)`. Ranks that no such expression tells apart are assumed to do the same.

Expressions that depend on nothing but the rank and the size of the world are evaluated for all ranks at once. What they decide counts unless
it only notes things (rank 0 prints and saves), by the rules of `value_uses.py`. Only the main script and the modules beside it are read: a
framework's own code treats its ranks alike, or exchanges messages, which is seen while it runs.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.recording.value_uses import (
    ENDS,
    NUMBERS,
    SIZES,
    ProgramSource,
    called,
    only_notes,
    source_of,
    statements_after,
)

UNKNOWN: Any = object()  # of an expression that depends on other things
MOST_CLASSES = 8  # of ranks that are emulated because of what was found

RANKS = {"RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}
LOCAL_RANKS = {"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"}
NODES = {"GROUP_RANK", "NODE_RANK", "SLURM_NODEID"}
WORLDS = {"WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"}
# What functions, attributes and parameters of these names are.
RANK_NAMES = {"get_rank", "global_rank", "process_index", "get_global_rank", "world_rank"}
LOCAL_NAMES = {"local_rank", "local_process_index", "get_node_local_rank"}  # get_local_rank is that of a mesh, too
NODE_NAMES = {"node_rank", "get_node_rank"}
MAIN_NAMES = {"is_main_process", "is_global_zero", "is_world_process_zero", "is_rank_zero", "is_master"}
LOCAL_MAIN_NAMES = {"is_local_main_process", "is_local_process_zero"}
WORLD_NAMES = {"world_size", "get_world_size", "num_processes"}
OWNERS = {"args", "opt", "self", "env", "state", "trainer", "fabric", "accelerator", "ctx", "dist"}  # whose .rank it is
FIGURES = NUMBERS | {
    "stack",
    "cat",
    "norm",
    "numel",
    "is_available",
}  # calls that make figures for a log, in hardly any time
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.BitXor: operator.xor, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.eq, ast.IsNot: operator.ne,
}  # fmt: skip


@dataclass(frozen=True)
class RankDifferences:
    """Classes of ranks that the program may treat differently, and the lines that tell them apart."""

    lines: list[str]  # file:line
    classes: list[list[int]]  # ranks of each, the class of rank 0 first; one class if the program treats all alike

    @property
    def differ(self) -> bool:
        return len(self.classes) > 1

    @property
    def needed(self) -> list[int]:
        """One rank of each class; of many classes, those of the smallest ones and the last."""
        first = [each[0] for each in self.classes]
        if len(first) <= MOST_CLASSES:
            return first
        rare = sorted(self.classes[1:-1], key=len)[: MOST_CLASSES - 2]
        return sorted({0, first[-1], *(each[0] for each in rare)})


def rank_differences(world_size: int, ranks_per_node: int) -> RankDifferences:
    """What the program of this process does by its rank."""
    lines: list[str] = []
    keys: list[np.ndarray] = []
    for number, file in enumerate(program_files()):
        source = source_of(file)
        if source is not None:
            reader = _Reader(source, world_size, ranks_per_node, is_main=number == 0)
            for line, values in sorted(reader.found(), key=lambda each: each[0]):
                lines.append(f"{file}:{line}")
                keys.append(values)
    if not keys:
        return RankDifferences([], [list(range(world_size))])
    _, first, labels = np.unique(np.stack(keys, 1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return RankDifferences(
        list(dict.fromkeys(lines)), [np.flatnonzero(labels.ravel() == each).tolist() for each in order]
    )


def program_files() -> list[str]:
    """The main script, and then the loaded modules beside it."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return []
    folder = Path(main).resolve().parent
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    beside = {str(Path(file).resolve()) for file in loaded if file and file.endswith(".py")}
    script = str(Path(main).resolve())
    return [script, *sorted(file for file in beside if Path(file).parent == folder and file != script)]


class _Reader:
    """The expressions of one file that tell ranks apart."""

    def __init__(self, source: ProgramSource, world_size: int, ranks_per_node: int, is_main: bool) -> None:
        self.source = source
        self.is_main = is_main
        self.ranks = np.arange(world_size)
        self.local, self.node = self.ranks % ranks_per_node, self.ranks // ranks_per_node
        self.world_size = world_size
        self.names: dict[str, Any] = {}
        for _ in range(3):  # names that are made from names
            self._read_names()

    def found(self) -> Iterable[tuple[int, np.ndarray]]:
        for node in self._nodes():
            for part in self._deciding(node):
                for each in self._telling(part):
                    yield part.lineno, np.unique(self.value(each), return_inverse=True)[1].ravel()

    def _nodes(self) -> Iterable[ast.AST]:
        """All of the file, but not the `main` of a module that was only imported."""
        left: list[ast.AST] = [self.source.tree]
        while left:
            node = left.pop()
            if isinstance(node, ast.FunctionDef) and node.name == "main" and not self.is_main:
                continue
            yield node
            left += ast.iter_child_nodes(node)

    # ---- what decides something ----
    def _deciding(self, node: ast.AST) -> list[ast.expr]:
        """Tests and sizes that change the work of a rank."""
        if isinstance(node, ast.If):
            if self._changes_work(node):
                return [node.test]
        elif isinstance(node, ast.While):
            return [node.test]
        elif isinstance(node, ast.comprehension):
            return list(node.ifs)
        elif isinstance(node, ast.IfExp) and (_works(node.body) or _works(node.orelse)):
            return [node.test]
        elif isinstance(node, ast.Call) and (called(node) == "range" or called(node) in SIZES):
            return [argument for argument in node.args if self._varies(argument)]
        return []

    def _changes_work(self, branch: ast.If) -> bool:
        arms = [*branch.body, *branch.orelse]
        if not only_notes(arms, FIGURES):
            return True
        inside = list(ast.walk(branch))
        if any(isinstance(each, ast.Raise) for each in inside):
            return True
        if any(isinstance(each, ast.Call) and called(each) in ENDS for each in inside):
            return True
        leaves = any(isinstance(each, ast.Return | ast.Break | ast.Continue) for each in inside)
        return leaves and not only_notes(statements_after(self.source, branch), FIGURES)

    def _telling(self, node: ast.expr) -> list[ast.expr]:
        """The largest parts of an expression that are known for every rank and not the same for all."""
        if self._varies(node):
            return [node]
        return [
            each for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr) for each in self._telling(part)
        ]

    def _varies(self, node: ast.expr) -> bool:
        value = self.value(node)
        return isinstance(value, np.ndarray) and bool((value != value[0]).any())

    # ---- values ----
    def _read_names(self) -> None:
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.arg):
                self._set(node.arg, self._named(node.arg, "rank"))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._assign(one, other)
        elif isinstance(target, ast.Name):
            self._set(target.id, self.value(value))

    def _set(self, name: str, value: Any) -> None:
        """A name that has a value which only depends on the rank, wherever it is assigned."""
        if value is not UNKNOWN and (isinstance(value, np.ndarray) or name in self.names):
            self.names[name] = value

    def _named(self, name: str, also: str = "") -> Any:
        """What a function, an attribute or a parameter of that name is."""
        for names, value in (
            (RANK_NAMES | {also}, self.ranks), (LOCAL_NAMES, self.local), (NODE_NAMES, self.node), (MAIN_NAMES, self.ranks == 0),
            (LOCAL_MAIN_NAMES, self.local == 0), (WORLD_NAMES, self.world_size),
        ):  # fmt: skip
            if name in names:
                return value
        return UNKNOWN

    def _variable(self, name: Any) -> Any:
        for names, value in (
            (RANKS, self.ranks),
            (LOCAL_RANKS, self.local),
            (NODES, self.node),
            (WORLDS, self.world_size),
        ):
            if name in names:
                return value
        return UNKNOWN

    def value(self, node: ast.expr) -> Any:
        """The value of an expression: one for all ranks, an array with one for each, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            return self._named(node.attr, "rank" if owner in OWNERS else "")
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            environ = isinstance(node.value, ast.Attribute) and node.value.attr == "environ"
            return self._variable(node.slice.value) if environ else UNKNOWN
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BinOp):
            return self._combine(BINARY.get(type(node.op)), self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compare(node.ops[0], self.value(node.left), node.comparators[0])
        if isinstance(node, ast.BoolOp):
            return self._bool(node)
        return UNKNOWN

    def _call(self, node: ast.Call) -> Any:
        name = called(node)
        if name in ("int", "bool") and len(node.args) == 1:
            return self.value(node.args[0])
        if name in ("getenv", "get") and node.args and isinstance(node.args[0], ast.Constant):
            return self._variable(node.args[0].value)
        grouped = bool(node.args or node.keywords)  # of a group, whose ranks are not known
        return UNKNOWN if grouped else self._named(name)

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if value is UNKNOWN:
            return UNKNOWN
        if isinstance(node.op, ast.Not):
            return value == 0 if isinstance(value, np.ndarray) else not value
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float | np.ndarray) else UNKNOWN

    def _combine(self, act: Callable[[Any, Any], Any] | None, left: Any, right: Any) -> Any:
        if act is None or left is UNKNOWN or right is UNKNOWN:
            return UNKNOWN
        try:
            with np.errstate(all="ignore"):
                return act(left, right)
        except (TypeError, ValueError, ZeroDivisionError):
            return UNKNOWN

    def _compare(self, comparison: ast.cmpop, left: Any, right: ast.expr) -> Any:
        if isinstance(comparison, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List | ast.Set) or not isinstance(left, np.ndarray):
                return UNKNOWN
            found = [self.value(each) for each in right.elts]
            if not all(isinstance(each, int) for each in found):
                return UNKNOWN
            return np.isin(left, found, invert=isinstance(comparison, ast.NotIn))
        return self._combine(COMPARISONS.get(type(comparison)), _number(left), _number(self.value(right)))

    def _bool(self, node: ast.BoolOp) -> Any:
        values = [self.value(each) for each in node.values]
        if any(value is UNKNOWN for value in values):
            return UNKNOWN
        together = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return together.reduce([np.broadcast_to(np.asarray(value) != 0, self.ranks.shape) for value in values])


def _number(value: Any) -> Any:
    """Environment variables are compared as text: `os.environ["RANK"] == "0"`."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _works(arm: ast.expr) -> bool:
    """Whether the arm of a conditional expression makes a difference to the work: a number, or a call that does some."""
    number = isinstance(arm, ast.Constant) and isinstance(arm.value, int | float) and not isinstance(arm.value, bool)
    return number or not only_notes([ast.Expr(arm)], FIGURES)
