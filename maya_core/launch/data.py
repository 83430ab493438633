"""What the program's data loaders give it: samples and tokens of each step, and how many steps make an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import dataloader

from maya_core.device.patches import Patches

DEEPEST = 4  # levels of lists and dicts in a batch that are looked into


class DataRecord:
    """Notes every batch that is taken with gradients enabled: validation loops switch them off."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.restart()

    def restart(self) -> None:
        self._batches: list[tuple[int, int, int]] = []  # (events recorded before it, samples, tokens)
        self._length: int | None = None
        self._replicas: int | None = None

    def put_on(self, patches: Patches) -> None:
        original = dataloader._BaseDataLoaderIter.__next__

        def __next__(iterator: Any) -> Any:
            batch = original(iterator)
            if torch.is_grad_enabled():
                self._note(iterator, batch)
            return batch

        patches.set(dataloader._BaseDataLoaderIter, "__next__", __next__)

    def _note(self, iterator: Any, batch: Any) -> None:
        samples, tokens = size_of(batch)
        if not samples:
            return
        self._batches.append((self.native.event_count(), samples, tokens))
        if self._length is None:
            sampler = getattr(iterator, "_index_sampler", None)
            try:
                self._length = len(sampler) if sampler is not None else None
            except TypeError:  # an endless stream
                self._length = None
            inner = getattr(sampler, "sampler", sampler)
            replicas = getattr(inner, "num_replicas", None)
            self._replicas = replicas if isinstance(replicas, int) else None

    def by_step(self, ends: list[int]) -> dict[str, Any]:
        """For the trace: what was taken between the ends of steps, which are numbers of events."""
        steps, begun = [], 0
        for end in ends:
            taken = [row for row in self._batches if begun <= row[0] < end]
            steps.append(
                {
                    "batches": len(taken),
                    "samples": sum(row[1] for row in taken),
                    "tokens": sum(row[2] for row in taken),
                }
            )
            begun = end
        return {"steps": steps, "length": self._length, "replicas": self._replicas}


def size_of(batch: Any) -> tuple[int, int]:
    """(samples, tokens): the first dimension of the first tensor that has one, and the integers of the first table of them."""
    tensors = list(_tensors(batch, 0))
    samples = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), 0)
    tables = [t for t in tensors if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool]
    return int(samples), int(tables[0].numel()) if tables else 0


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEEPEST:
        if isinstance(value, dict) or (hasattr(value, "values") and callable(value.values)):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for each in value:
                yield from _tensors(each, depth + 1)
