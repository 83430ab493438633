"""Records what the program takes from its data loaders: samples and tokens per step, and the length of an epoch.

Frameworks with data loaders of their own call `BatchRecord` from their integrations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from maya_core.patches import Patches
from maya_core.torch_seam.training import NEXT_BATCH, index_sampler

DEEPEST = 4  # levels of lists and dicts in a batch that are searched for tensors


@dataclass
class _Loader:
    """One of the program's loaders: its length, its replicas, and what was taken from it, as (events recorded before, batches,
    samples, tokens)."""

    length: int | None
    replicas: int | None
    taken: list[tuple[int, int, int, int]] = field(default_factory=list)


class BatchRecord:
    """Records every batch that is taken while gradients are enabled.

    If there are several loaders, the one with the most batches that are followed by a backward pass counts; validation batches
    are not. Frameworks wrap torch's loaders in their own, which prefetch, join or divide batches. Their integrations record what
    the program receives (`note`) and hide what happens inside (`within`).
    """

    def __init__(self, native: ModuleType, on_batch: Callable[[Any], None] = lambda _: None) -> None:
        """`on_batch` is called with the iterator from which a batch to train on was taken."""
        self.native = native
        self._on_batch = on_batch
        self._within = 0
        self.restart()

    def restart(self) -> None:
        self._loaders: dict[int, _Loader] = {}  # by the id of the loader or of its sampler, which outlives an epoch
        self._kept: list[Any] = []  # so that no other object can get the same id

    def install(self, patches: Patches) -> None:
        NEXT_BATCH.wrap(patches, self._noting)

    def _noting(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def __next__(iterator: Any) -> Any:
            batch = original(iterator)
            if torch.is_grad_enabled():
                self._on_batch(iterator)
            if self._within or not torch.is_grad_enabled():
                return batch
            try:
                size = batch_size(batch)
            except Exception:  # a batch of an unknown type: the program must not fail because it is counted
                return batch
            sampler = index_sampler(iterator)
            self.note(sampler, [size], length_of(sampler), _replicas(sampler))
            return batch

        return __next__

    @contextmanager
    def within(self) -> Iterator[None]:
        """Inside a framework's loader, which records by itself what it returns."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    def note(
        self, loader: Any, sizes: list[tuple[int, int]], length: int | None = None, replicas: int | None = None
    ) -> None:
        """Records that the program took batches of these (samples, tokens) from a loader and trains on all of them next."""
        sizes = [size for size in sizes if size[0]]
        if self._within or not sizes or not torch.is_grad_enabled():
            return
        if id(loader) not in self._loaders:
            self._kept.append(loader)
            self._loaders[id(loader)] = _Loader(length, replicas)
        samples, tokens = (sum(each) for each in zip(*sizes, strict=True))
        self._loaders[id(loader)].taken.append((self.native.event_count(), len(sizes), samples, tokens))

    def by_step(self, ends: list[int], forward: np.ndarray, backward: np.ndarray) -> dict[str, Any]:
        """What was trained on in each step, for the trace. `ends`, `forward` and `backward` are numbers of events."""
        best: tuple[float, dict[str, Any]] = (0.0, {"steps": [], "length": None, "replicas": None})
        trained = self._trained(forward, backward)
        for number, loader in enumerate(self._loaders.values()):
            rows = np.array(loader.taken, np.int64).reshape(-1, 4)[trained[number]]
            step = np.searchsorted(np.array(ends, np.int64), rows[:, 0], side="right")
            totals = [np.bincount(step, rows[:, column], len(ends) + 1)[: len(ends)] for column in (1, 2, 3)]
            steps = [
                {"batches": int(batches), "samples": int(samples), "tokens": int(tokens)}
                for batches, samples, tokens in zip(*totals, strict=True)
            ]
            if totals[0].sum() > best[0]:
                best = float(totals[0].sum()), {"steps": steps, "length": loader.length, "replicas": loader.replicas}
        return best[1]

    def _trained(self, forward: np.ndarray, backward: np.ndarray) -> list[np.ndarray]:
        """For each loader, which of its batches were trained on: a backward pass follows before the next batch of any loader.

        A program may take all batches of a step before it trains on the first. Then as many of the batches that it took in a row
        from one loader count as there are backward passes after them, starting with the last.
        """
        trained = [np.zeros(len(one.taken), bool) for one in self._loaders.values()]
        taken = sorted(
            (row[0], n, i) for n, one in enumerate(self._loaders.values()) for i, row in enumerate(one.taken)
        )
        passes = backward[
            np.diff(np.searchsorted(forward, backward), prepend=-1) > 0
        ]  # the first op of each backward pass
        in_a_row: list[tuple[int, int]] = []
        for here, (start, number, index) in enumerate(taken):
            if in_a_row and in_a_row[-1][0] != number:
                in_a_row = []
            in_a_row.append((number, index))
            until = taken[here + 1][0] if here + 1 < len(taken) else np.iinfo(np.int64).max
            if np.searchsorted(backward, start) == np.searchsorted(backward, until):
                continue
            count = max(1, int(np.searchsorted(passes, until) - np.searchsorted(passes, start)))
            for which, row in in_a_row[-count:]:
                trained[which][row] = True
            in_a_row = []
        return trained


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream without a length
        return None


def _replicas(sampler: Any) -> int | None:
    found = getattr(getattr(sampler, "sampler", sampler), "num_replicas", None)
    return found if isinstance(found, int) else None


def batch_size(batch: Any) -> tuple[int, int]:
    """(samples, tokens): the first dimension of the first tensor that has one, and the size of the first two-dimensional integer tensor."""
    tensors = list(tensors_of(batch))
    samples = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), 0)
    tables = [t for t in tensors if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool]
    return int(samples), int(tables[0].numel()) if tables else 0


def tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a batch, including those in its lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < DEEPEST:
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for each in value:
                yield from tensors_of(each, depth + 1)
