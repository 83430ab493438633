"""CUDA graphs and memory pools on the emulated device, as bases for torch's own classes.

A capture takes the captured work out of the record of this rank, and each replay records it again (native/graphs.cpp).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from maya_core.device.shim.streams import rerun
from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam
from maya_core.torch_seam.names import replace_all


def _graph_class(native: ModuleType, pool_numbers: Iterator[int]) -> type:
    class CUDAGraphBase:
        _graph: Any
        _pool: tuple[int, int] | None
        _has_graph_exec: bool

        def __new__(cls, keep_graph: bool = False) -> CUDAGraphBase:
            graph = super().__new__(cls)
            graph._graph = native.Graph()
            graph._pool = None
            graph._has_graph_exec = False
            return graph

        def capture_begin(
            self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global", **_: Any
        ) -> None:
            self._pool = (pool[0], pool[1]) if pool is not None else (next(pool_numbers), 0)
            self._graph.capture_begin(self._pool)

        def capture_end(self) -> None:
            self._graph.capture_end()

        def capture_end_pre(self) -> None:  # since torch 2.14, Python calls the two halves
            self._graph.capture_end()

        def capture_end_post(self) -> None: ...

        def instantiate(self) -> None:
            self._has_graph_exec = True

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            self._graph.reset()

        def pool(self) -> tuple[int, int] | None:
            return self._pool

        def pools(self) -> list[tuple[int, int]]:
            return [self._pool] if self._pool is not None else []

        def _retain_pool(self, pool: tuple[int, int]) -> None: ...

        def enable_debug_mode(self) -> None: ...

        def debug_dump(self, debug_path: str) -> None:
            raise RuntimeError("An emulated CUDA graph has no cudaGraph_t to dump: skip debug_dump under emulation.")

        def register_generator_state(self, generator: torch.Generator) -> None: ...

    return CUDAGraphBase


def _pool_class(native: ModuleType, pool_numbers: Iterator[int]) -> type:
    class MemPoolBase:
        def __init__(
            self, allocator: Any = None, is_user_created: bool = True, use_on_oom: bool = False, no_split: bool = False
        ) -> None:
            if allocator is not None:
                raise NotImplementedError(
                    "Maya does not emulate a torch.cuda.MemPool with a custom allocator; create it without one."
                )
            self._id = (0, next(pool_numbers)) if is_user_created else (next(pool_numbers), 0)
            self._allocator = allocator
            self._device = native.get_device()
            native.create_pool(self._device, self._id, use_on_oom, no_split)

        def __del__(self) -> None:
            if native.installed():
                native.destroy_pool(self._device, self._id)

        @property
        def id(self) -> tuple[int, int]:
            return self._id

        @property
        def allocator(self) -> Any:
            return self._allocator

        def use_count(self) -> int:
            return int(native.pool_use_count(self._device, self._id))

    return MemPoolBase


def install(native: ModuleType, patches: Patches) -> None:
    pool_numbers = itertools.count(1)
    replace_all(
        patches,
        {
            seam.GRAPH: _graph_class(native, pool_numbers),
            seam.GRAPH_POOL_HANDLE: lambda: (next(pool_numbers), 0),
            seam.IS_CURRENT_STREAM_CAPTURING: native.capturing,
            seam.MEM_POOL: _pool_class(native, pool_numbers),
            seam.BEGIN_ALLOCATE_TO_POOL: native.begin_allocate_to_pool,
            seam.BEGIN_ALLOCATE_STREAM_TO_POOL: native.begin_allocate_to_pool,
            seam.BEGIN_ALLOCATE_THREAD_TO_POOL: native.begin_allocate_all_to_pool,
            seam.END_ALLOCATE_TO_POOL: native.end_allocate_to_pool,
            seam.RELEASE_POOL: native.release_pool,
        },
    )

    graphs = rerun(torch.cuda.graphs)
    for name in ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing", "make_graphed_callables"):
        patches.set(torch.cuda.graphs, name, getattr(graphs, name))
        patches.set(torch.cuda, name, getattr(graphs, name))
    memory = rerun(torch.cuda.memory)
    for name in ("MemPool", "use_mem_pool"):
        patches.set(torch.cuda.memory, name, getattr(memory, name))
        patches.set(torch.cuda, name, getattr(memory, name))
