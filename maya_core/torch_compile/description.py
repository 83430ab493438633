"""Writes what inductor knows about a kernel into the generated code, next to the kernel.

There it is found again when the generated code comes from a cache, without a graph. It is not part of the kernel's own source, because
inductor merges kernels with equal sources.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from maya_core.patches import Patches
from maya_core.torch_compile.source import use_of
from maya_core.torch_compile.templates import template_of
from maya_core.torch_seam import compile as seam
from maya_core.trace.triton_kernel import TritonKernel
from maya_core.version import PACKAGE

KEY = "maya"  # in a kernel's inductor_meta
MOST_LINES = 8
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
LIBRARIES = (*torch.__path__, str(PACKAGE))


def install(patches: Patches) -> None:
    def describing_kernels(original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def define(self: Any, source: str, schedule: Any, kernel: Any) -> str:
            wrapper = seam.current_wrapper()
            define_in_wrapper = wrapper.define_kernel

            def define_kernel(name: str, body: str, *args: Any, **kwargs: Any) -> None:
                described = {**describe(kernel), **sources(_nodes(schedule))}
                define_in_wrapper(name, f"{body}\n{name}.inductor_meta[{KEY!r}] = {described!r}", *args, **kwargs)

            wrapper.define_kernel = define_kernel
            try:
                return original(self, source, schedule, kernel)
            finally:
                del wrapper.define_kernel

        return define

    def describing_templates(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def inductor_meta_common(self: Any) -> dict[str, Any]:
            return {**original(), KEY: describe_template(self)}

        return inductor_meta_common

    seam.DEFINE_KERNEL.wrap(patches, describing_kernels)
    seam.TEMPLATE_META.wrap(patches, describing_templates)


def describe(kernel: Any) -> dict[str, Any]:
    """What a kernel's source does not say about it."""
    if parts := getattr(kernel, "sub_kernels", None):  # several kernels in one launch
        return {"nbytes": sum(describe(part)["nbytes"] for part in parts), "parts": len(parts)}
    if hasattr(kernel, "output_node"):
        return describe_template(kernel)
    hint = kernel.features.get_reduction_hint() if kernel.features.is_reduction() else ""
    return {
        "nbytes": int(kernel.estimate_kernel_num_bytes()),
        "hint": getattr(hint, "name", ""),
        "numels": {name: seam.size_hint(size) for name, size in kernel.numels.items()},
    }


def describe_template(kernel: Any) -> dict[str, Any]:
    """The description of a template's kernel."""
    return {
        "nbytes": int(kernel.estimate_kernel_num_bytes()),
        "flops": int(kernel.estimate_flops() or 0),
        "template": template_of(kernel),
    }


def _nodes(schedule: Iterable[Any]) -> list[Any]:
    """The FX nodes in a kernel. A schedule also contains markers of loops, which are skipped."""
    scheduled = [part for one in schedule if hasattr(one, "get_nodes") for part in one.get_nodes()]
    return [origin for one in scheduled if one.node is not None for origin in one.node.get_origins()]


def sources(nodes: list[Any]) -> dict[str, Any]:
    """The fused ops, and the lines of the program that call them."""
    ops: dict[str, None] = {}
    lines: dict[str, None] = {}
    for node in sorted(nodes, key=lambda one: one.name):
        if original := node.meta.get("original_aten"):
            ops[str(seam.packet(original)).removeprefix("aten.")] = None
        if line := program_line(node.meta.get("stack_trace") or ""):
            lines[line] = None
    return {"ops": list(ops), "lines": list(lines)[:MOST_LINES]}


def program_line(stack: str) -> str:
    """The innermost line of a stack outside torch and Maya."""
    frames = [(file, line) for file, line in FRAME.findall(stack) if not file.startswith(LIBRARIES)]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def kernel_of(tuner: Any, config: Any, configs: int) -> TritonKernel:
    """The kernel of a CachingAutotuner with one of its configurations."""
    meta = tuner.inductor_meta
    described = meta.get(KEY, {})
    tiles = {**meta.get("config_args", {}), **config.kwargs}  # the tiles of a template are in its source
    counted = meta.get("kernel_num_gb")  # present in kernels that are only benchmarked
    return TritonKernel(
        name=meta.get("kernel_name") or tuner.fn.__name__,
        kind=str(getattr(tuner.heuristic_type, "name", tuner.heuristic_type)).lower(),
        nbytes=described.get("nbytes", None if counted is None else round(counted * 1e9)),
        flops=described.get("flops", 0),
        loads=meta.get("num_load") or 0,
        stores=meta.get("num_store") or 0,
        reductions=meta.get("num_reduction") or 0,
        hint=described.get("hint", ""),
        numels=described.get("numels", {}),
        atomic=bool(meta.get("atomic_add_found")),
        rereads=use_of(tuner.fn.fn).rereads,
        config={name: value for name, value in tiles.items() if isinstance(value, int | float | str | bool)},
        warps=config.num_warps,
        stages=config.num_stages,
        configs=configs,
        ops=described.get("ops", []),
        lines=described.get("lines", []),
        template=described.get("template", {}),
    )
