"""Kernels written in Triton: a launch is recorded with its name, grid and tensors, and nothing is compiled or run. Checked with triton 3.7.

Which tensors a kernel reads and which it writes is read from its source: what `tl.load` and `tl.store` (and atomics) are given leads back to
its parameters. Each is taken to be gone through once. That is right for elementwise kernels, norms, losses; a product of matrices
(`tl.dot`) takes longer than its memory traffic, and is named as a lower bound.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import ModuleType
from typing import Any, NamedTuple

import torch

from maya_core.device.kernels.planner import Planner
from maya_core.device.kernels.triton import NAMESPACE, TritonKernel
from maya_core.device.patches import Patches
from maya_core.device.rules import Rules
from maya_core.launch.progress import say

READS = (
    "load",
    "atomic_add",
    "atomic_max",
    "atomic_min",
    "atomic_cas",
    "atomic_xchg",
    "atomic_and",
    "atomic_or",
    "atomic_xor",
)
WRITES = ("store", *READS[1:])


class Use(NamedTuple):
    """What a kernel does to its parameters, by name; and whether it multiplies matrices."""

    reads: frozenset[str]
    writes: frozenset[str]
    multiplies: bool


def put_on(rules: Rules, planner: Planner, patches: Patches) -> None:
    def kernels(module: ModuleType) -> None:
        patches.set(module.JITFunction, "run", functools.partialmethod(_launch, rules, planner))

    def tuners(module: ModuleType) -> None:
        patches.set(module.Autotuner, "run", _first_configuration)

    patches.when_imported("triton.runtime.jit", kernels)
    patches.when_imported("triton.runtime.autotuner", tuners)


def _launch(kernel: Any, rules: Rules, planner: Planner, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if warmup:
        return
    given = {**_defaults(kernel.fn), **dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    size = grid(given) if callable(grid) else grid
    blocks = [*map(int, size if isinstance(size, tuple | list) else (size,)), 1, 1][:3]
    use = use_of(kernel.fn)
    tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor) and one.is_cuda}
    name = kernel.fn.__name__
    if use.multiplies:
        _say_bound(name)
    written = [one for parameter, one in tensors.items() if parameter in use.writes or parameter not in use.reads]
    read = [one for parameter, one in tensors.items() if parameter in use.reads]
    described = TritonKernel(
        name,
        "user",
        config={
            one: value
            for one, value in {**_defaults(kernel.fn), **kwargs}.items()
            if one in kernel.arg_names and isinstance(value, int)
        },
        warps=kwargs.get("num_warps") or 0,
        stages=kwargs.get("num_stages") or 0,
        lines=[f"{inspect.getsourcefile(kernel.fn)}:{kernel.fn.__code__.co_firstlineno}"],
    )
    rules.record(NAMESPACE + name, [*read, blocks, [], planner.number_of(described)], written)
    for one in written:
        rules.forget(one)


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


@functools.cache
def _say_bound(name: str) -> None:
    say(
        f"the Triton kernel {name} multiplies matrices: it is taken to last as long as its memory traffic, a lower bound"
    )


def _first_configuration(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """There is nothing to measure: the first configuration that is left after pruning."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    config = tuner.prune_configs(kwargs)[0]
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
    launched = tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    tuner.nargs = None
    return launched


@functools.cache
def use_of(function: Any) -> Use:
    """Follows names from parameters through assignments to loads and stores."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return Use(frozenset(), frozenset(), False)
    parameters = set(inspect.signature(function).parameters)
    comes_from: dict[str, set[str]] = {name: {name} for name in parameters}
    reads: set[str] = set()
    writes: set[str] = set()
    multiplies = False

    def sources(node: ast.AST) -> set[str]:
        names = (one.id for one in ast.walk(node) if isinstance(one, ast.Name))
        return set().union(*(comes_from.get(name, set()) for name in names))

    for _ in range(2):  # a pointer that is moved in a loop is used before the line that moves it
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)):
                    # What was loaded is a number, and no longer an address.
                    comes_from.setdefault(name, set()).update(
                        set() if _calls(node.value, READS) else sources(node.value)
                    )
            elif isinstance(node, ast.Call) and node.args:
                reads |= sources(node.args[0]) if _named(node, READS) else set()
                writes |= sources(node.args[0]) if _named(node, WRITES) else set()
                multiplies = multiplies or _named(node, ("dot", "dot_scaled"))
    return Use(frozenset(reads & parameters), frozenset(writes & parameters), multiplies)


def _named(call: ast.Call, names: tuple[str, ...]) -> bool:
    return getattr(call.func, "attr", getattr(call.func, "id", "")) in names


def _calls(node: ast.AST, names: tuple[str, ...]) -> bool:
    return any(isinstance(one, ast.Call) and _named(one, names) for one in ast.walk(node))
