"""The program's own Triton kernels: a launch is recorded with its name, grid and tensors, and nothing is compiled or run.

The kernel's source (source.py) says which tensors it reads and writes. Each is assumed to be read or written once, and read again in each
further loop that loads it, unless it fits in the caches. Of a tensor whose addresses are loaded, at most as many elements are read as the
largest other tensor has. This is right for elementwise kernels, normalization, losses and embeddings. A matrix product (`tl.dot`) takes
longer than its memory traffic; it is reported as a lower bound.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from maya_core.device.planner import Planner
from maya_core.messages import say
from maya_core.ops.rules import Rules
from maya_core.patches import Patches
from maya_core.torch_compile.source import Use, use_of
from maya_core.torch_seam import compile as seam
from maya_core.trace.triton_kernel import NAMESPACE, TritonKernel


def install(rules: Rules, planner: Planner, patches: Patches) -> None:
    seam.RUN_KERNEL.replace(patches, functools.partialmethod(_launch, rules, planner))
    seam.RUN_TUNER.replace(patches, _first_configuration)


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
        _warn_about_bound(name)
    written = {one: tensor for one, tensor in tensors.items() if one in use.writes or one not in use.reads}
    read = {one: tensor for one, tensor in tensors.items() if one in use.reads}
    described = TritonKernel(
        name,
        "user",
        nbytes=_bytes(use, read, written) if use.gathers else None,
        atomic=use.adds,
        rereads=use.rereads,
        config={
            one: value
            for one, value in {**_defaults(kernel.fn), **kwargs}.items()
            if one in kernel.arg_names and isinstance(value, int)
        },
        warps=kwargs.get("num_warps") or 0,
        stages=kwargs.get("num_stages") or 0,
        lines=[f"{inspect.getsourcefile(kernel.fn)}:{kernel.fn.__code__.co_firstlineno}"],
    )
    rules.record(NAMESPACE + name, [*read.values(), blocks, [], planner.number_of(described)], list(written.values()))
    for one in written.values():
        rules.forget(one)


def _bytes(use: Use, *tables: dict[str, torch.Tensor]) -> int:
    """The bytes read and written. A tensor whose addresses are loaded counts at most as many elements as the largest other tensor has."""
    others = [one.numel() for table in tables for name, one in table.items() if name not in use.gathers]
    most = max(others, default=0)
    return sum(
        (min(one.numel(), most) if name in use.gathers else one.numel()) * one.element_size()
        for table in tables
        for name, one in table.items()
    )


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


@functools.cache
def _warn_about_bound(name: str) -> None:
    say(
        f"the Triton kernel {name} multiplies matrices: its duration is assumed to be that of its memory traffic, which is a lower bound"
    )


def _first_configuration(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces autotuning, which has nothing to measure: runs the first configuration that pruning keeps."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    config = tuner.prune_configs(kwargs)[0]
    tuner.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
    launched = tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    tuner.nargs = None
    return launched
