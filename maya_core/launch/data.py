"""What the program's data loaders give it: samples and tokens of each step, and how many steps make an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader

from maya_core.device.patches import Patches

DEEPEST = 4  # levels of lists and dicts in a batch that are looked into


@dataclass
class _Loader:
    """One of the program's loaders: its length and replicas, and its batches as (events recorded before it, samples, tokens)."""

    length: int | None
    replicas: int | None
    batches: list[tuple[int, int, int]] = field(default_factory=list)


class DataRecord:
    """Notes every batch that is taken with gradients enabled. Of several loaders the one with most batches that are trained on
    counts: validation's are not followed by a backward."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.restart()

    def restart(self) -> None:
        self._loaders: dict[int, _Loader] = {}  # by the sampler's identity, which outlives an epoch
        self._kept: list[Any] = []  # so that no other object gets a sampler's identity

    def put_on(self, patches: Patches) -> None:
        original = dataloader._BaseDataLoaderIter.__next__

        def __next__(iterator: Any) -> Any:
            batch = original(iterator)
            if torch.is_grad_enabled():
                self._note(iterator, batch)
            return batch

        patches.set(dataloader._BaseDataLoaderIter, "__next__", __next__)

    def _note(self, iterator: Any, batch: Any) -> None:
        try:
            samples, tokens = size_of(batch)
        except Exception:  # a batch of the user's own kind: nothing of theirs may fail for our counting
            return
        if not samples:
            return
        sampler = getattr(iterator, "_index_sampler", None)
        if id(sampler) not in self._loaders:
            self._kept.append(sampler)
            self._loaders[id(sampler)] = _Loader(_length(sampler), _replicas(sampler))
        self._loaders[id(sampler)].batches.append((self.native.event_count(), samples, tokens))

    def by_step(self, ends: list[int], backward: np.ndarray) -> dict[str, Any]:
        """For the trace: what was trained on between the ends of steps. `ends` and `backward` are numbers of events."""
        best: tuple[float, dict[str, Any]] = (0.0, {"steps": [], "length": None, "replicas": None})
        every = np.sort(np.array([row[0] for one in self._loaders.values() for row in one.batches], np.int64))
        for loader in self._loaders.values():
            rows = np.array(loader.batches, np.int64).reshape(-1, 3)
            # Trained on: there is a backward op before the next batch, of whatever loader, is taken.
            until = np.append(every, np.iinfo(np.int64).max)[np.searchsorted(every, rows[:, 0], side="right")]
            rows = rows[np.searchsorted(backward, rows[:, 0]) < np.searchsorted(backward, until)]
            step = np.searchsorted(np.array(ends, np.int64), rows[:, 0], side="right")
            totals = [
                np.bincount(step, weights, len(ends) + 1)[: len(ends)] for weights in (None, rows[:, 1], rows[:, 2])
            ]
            steps = [
                {"batches": int(batches), "samples": int(samples), "tokens": int(tokens)}
                for batches, samples, tokens in zip(*totals, strict=True)
            ]
            if totals[0].sum() > best[0]:
                best = float(totals[0].sum()), {"steps": steps, "length": loader.length, "replicas": loader.replicas}
        return best[1]


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:  # an endless stream
        return None


def _replicas(sampler: Any) -> int | None:
    found = getattr(getattr(sampler, "sampler", sampler), "num_replicas", None)
    return found if isinstance(found, int) else None


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
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for each in value:
                yield from _tensors(each, depth + 1)
