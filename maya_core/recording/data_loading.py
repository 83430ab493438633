"""Measures what data loading takes on this machine: the time in which a dataset makes a batch, in the program's process or in the workers of a
data loader, and the bytes that are copied to and from host memory that is not pinned.

Workers that are forked add to counters in shared memory. What workers do that are started anew (spawn) is not seen.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from maya_core.patches import Patches
from maya_core.torch_seam.training import FETCH, workers_of

MOST_WORKERS = 256


class DataLoadingRecord:
    """Counts the batches that were made and the seconds that they took. Column 0 of the counters is the program's process itself."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.restart()

    def restart(self) -> None:
        # New memory each time: a rank that is forked from this process must not count in the same one.
        shared = mmap.mmap(-1, 2 * 8 * (MOST_WORKERS + 1))
        self._counted = np.frombuffer(shared, np.float64).reshape(2, -1)  # seconds, batches
        self._workers = 0
        self.native.take_pageable_copies()

    def install(self, patches: Patches) -> None:
        for fetch in FETCH:
            fetch.wrap(patches, self._timing)

    def _timing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetch(fetcher: Any, indices: Any) -> Any:
            begun = time.perf_counter()
            batch = original(fetcher, indices)
            worker = get_worker_info()
            place = 0 if worker is None else 1 + worker.id % MOST_WORKERS
            self._counted[0, place] += time.perf_counter() - begun
            self._counted[1, place] += 1
            return batch

        return fetch

    def note_workers(self, iterator: Any) -> None:
        """The program takes a batch to train on from this iterator."""
        self._workers = workers_of(iterator)

    def found(self, ends: list[int]) -> dict[str, Any] | None:
        """For the trace; None if no batch was made here, and nothing copied. `ends` are the numbers of events at the ends of steps."""
        made, pageable = float(self._counted[1].sum()), self._pageable_per_step(ends)
        if not made and not pageable:
            return None
        return {
            "batch_s": float(self._counted[0].sum()) / made if made else 0.0,
            "workers": self._workers,
            "pageable_bytes": pageable,
        }

    def _pageable_per_step(self, ends: list[int]) -> int:
        """In the steps after the first one, in which a model moves to the device."""
        copies = np.array(self.native.take_pageable_copies(), np.int64).reshape(-1, 2)
        by_step = np.bincount(np.searchsorted(ends, copies[:, 0], side="right"), copies[:, 1], len(ends) + 1)[
            : len(ends)
        ]
        return round(float(np.mean(by_step[1:] if len(by_step) > 1 else by_step))) if len(by_step) else 0
