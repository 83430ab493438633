"""The memory functions of torch._C: statistics, snapshots, history and raw allocations of the emulated caching allocator.

The allocator itself is native/allocator*.cpp. Memory pools are in graphs.py, because CUDA graphs are what uses them.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam
from maya_core.torch_seam.names import Name, replace_all


def allocator_conf() -> str:
    """The allocator configuration that the program runs with, from the variables that torch reads."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def install(native: ModuleType, patches: Patches) -> None:
    functions: dict[Name, Any] = {
        seam.MEMORY_STATS: native.memory_stats,
        seam.RESET_PEAK_MEMORY_STATS: native.reset_peak_memory_stats,
        seam.RESET_ACCUMULATED_MEMORY_STATS: native.reset_accumulated_memory_stats,
        seam.HOST_MEMORY_STATS: dict,
        seam.RESET_PEAK_HOST_MEMORY_STATS: lambda: None,
        seam.RESET_ACCUMULATED_HOST_MEMORY_STATS: lambda: None,
        seam.EMPTY_CACHE: lambda pool=(0, 0): native.empty_cache(pool),
        seam.HOST_EMPTY_CACHE: lambda: None,
        seam.SET_MEMORY_FRACTION: native.set_memory_fraction,
        seam.GET_MEMORY_FRACTION: native.memory_fraction,
        seam.ATTACH_OUT_OF_MEMORY_OBSERVER: lambda observer: None,
        seam.GET_ALLOCATOR_BACKEND: lambda: "native",
        seam.ENABLE_ALLOCATOR: lambda enabled: None,
        seam.IS_ALLOCATOR_ENABLED: lambda: True,
        **_history_functions(native),
        **_raw_functions(native),
    }
    replace_all(patches, functions)


def _history_functions(native: ModuleType) -> dict[Name, Any]:
    history = {"enabled": False}

    def record_history(
        enabled: str | None, context: str | None = "all", stacks: str = "all", max_entries: int = sys.maxsize, *_: Any
    ) -> None:
        history["enabled"] = enabled is not None
        native.record_memory_history(
            enabled is not None, context is not None, min(max_entries, 2**62), context in ("all", "state")
        )

    def record_history_legacy(enabled: bool, record_context: bool = True, max_entries: int = 1, *_: Any) -> None:
        record_history("all" if enabled else None, "all" if record_context else None, "all", max_entries)

    def snapshot(pool: Any = None) -> dict[str, Any]:
        which = (pool[0], pool[1]) if pool else (0, 0)
        traces = pool[2] if pool and len(pool) > 2 else True
        taken: dict[str, Any] = native.memory_snapshot(which, traces)
        taken["allocator_settings"] = {
            "PYTORCH_CUDA_ALLOC_CONF": allocator_conf(),
            "expandable_segments": "expandable_segments:true" in allocator_conf().lower(),
        }
        return taken

    return {
        seam.MEMORY_SNAPSHOT: snapshot,
        seam.RECORD_MEMORY_HISTORY: record_history,
        seam.RECORD_MEMORY_HISTORY_LEGACY: record_history_legacy,
        seam.IS_HISTORY_ENABLED: lambda: history["enabled"],
    }


def _raw_functions(native: ModuleType) -> dict[Name, Any]:
    tokens: dict[int, int] = {}  # by pointer

    def raw_alloc(size: int, stream: int) -> int:
        pointer, token = native.raw_alloc(size, stream)
        tokens[pointer] = token
        return int(pointer)

    def raw_delete(pointer: int) -> None:
        # An unknown pointer belongs to a CUDA graph's pool: torch_compile/graph_trees.py.
        if (token := tokens.pop(pointer, None)) is not None:
            native.raw_delete(token)

    return {
        seam.RAW_ALLOC: raw_alloc,
        seam.RAW_DELETE: raw_delete,
    }
