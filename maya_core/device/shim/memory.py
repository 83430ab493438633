"""The memory functions of torch._C: statistics, snapshots, history and raw allocations of the emulated caching allocator.

The allocator itself is native/allocator*.cpp. Memory pools are in graphs.py, because CUDA graphs are what uses them.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch

from maya_core.patches import Patches


def allocator_conf() -> str:
    """The allocator configuration that the program runs with, from the variables that torch reads."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def install(native: ModuleType, patches: Patches) -> None:
    functions = {
        "_cuda_memoryStats": native.memory_stats,
        "_cuda_resetPeakMemoryStats": native.reset_peak_memory_stats,
        "_cuda_resetAccumulatedMemoryStats": native.reset_accumulated_memory_stats,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_emptyCache": lambda pool=(0, 0): native.empty_cache(pool),
        "_host_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": native.set_memory_fraction,
        "_cuda_getMemoryFraction": native.memory_fraction,
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_enable": lambda enabled: None,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        **_history_functions(native),
        **_raw_functions(native),
    }
    for name, function in functions.items():
        patches.set(torch._C, name, function)


def _history_functions(native: ModuleType) -> dict[str, Any]:
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
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": record_history_legacy,
        "_cuda_isHistoryEnabled": lambda: history["enabled"],
    }


def _raw_functions(native: ModuleType) -> dict[str, Any]:
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
        "_cuda_cudaCachingAllocator_raw_alloc": raw_alloc,
        "_cuda_cudaCachingAllocator_raw_delete": raw_delete,
    }
