"""Records samples and tokens per step if accelerate's data loaders are between torch's loaders and the program. They prefetch batches
and join what they send to all ranks, and Trainer takes all batches of a step at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import BatchRecord, Integration, length_of
from maya_core.integration import batch_size as plain_batch_size

Size = tuple[int, int]  # samples, tokens


def install(integration: Integration) -> None:
    patches, record = integration.patches, integration.batches
    size = functools.partial(batch_size, integration)

    def accelerate_loaders(loaders: ModuleType) -> None:
        for loader in (loaders.DataLoaderShard, loaders.DataLoaderDispatcher):
            patches.set(loader, "__iter__", _noting_iter(loader.__iter__, record, size))

    def trainer(module: ModuleType) -> None:
        patches.set(module.Trainer, "get_batch_samples", _noting_step(module.Trainer.get_batch_samples, record, size))

    patches.when_imported("accelerate.data_loader", accelerate_loaders)
    patches.when_imported("transformers.trainer", trainer)


def _noting_iter(original: Callable[..., Any], record: BatchRecord, size: Callable[..., Size]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:
        batches = original(self)
        while True:
            with record.within():
                batch = next(batches, _END)
            if batch is _END:
                return
            record.note(self, [size(batch, _examples(self))], length_of(self), _replicas(self))
            yield batch

    return __iter__


_END = object()


def _noting_step(original: Callable[..., Any], record: BatchRecord, size: Callable[..., Size]) -> Callable[..., Any]:
    """Trainer takes the batches of a whole step, including gradient accumulation, before it trains on the first."""

    @functools.wraps(original)
    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record.within():
            taken = original(self, *args, **kwargs)
        loader = self.callback_handler.train_dataloader
        sizes = [size(batch, _examples(loader)) for batch in taken[0]]
        record.note(loader, sizes, length_of(loader), _replicas(loader))
        return taken

    return get_batch_samples


def _replicas(loader: Any) -> int | None:
    """The number of ranks over which accelerate distributes the data. With tensor parallelism these are not all."""
    if hasattr(loader, "slice_fn"):  # a DataLoaderDispatcher
        return 1 if getattr(loader, "submesh_tp", None) else int(loader.state.num_processes)  # not in accelerate 1.0
    for shard in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
        if isinstance(found := getattr(shard, "num_processes", None), int):
            return found
    return None


def _examples(loader: Any) -> int | None:
    """The number of examples from which accelerate makes a batch of this rank."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    found = getattr(sampler, "batch_size", None)
    if not isinstance(found, int):
        return None
    return found // sampler.num_processes if getattr(sampler, "split_batches", False) else found


def batch_size(integration: Integration, batch: Any, examples: int | None = None) -> Size:
    """The samples and tokens of a batch.

    Tokens include padding, because the GPU works on it. Each of several packed sequences is a sample. Rows that a collator makes
    from one example count as one sample: TRL makes a chosen and a rejected text from each preference.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2:
        try:
            return plain_batch_size(batch)
        except Exception:  # a batch of an unknown type: the program must not fail because it is counted
            return 0, 0
    rows = int(ids.shape[0])
    if rows == 1:
        return _sequences(integration, batch), ids.numel()
    return examples if examples and rows % examples == 0 else rows, ids.numel()


def _sequences(integration: Integration, batch: Mapping[str, Any]) -> int:
    """The number of packed sequences in a batch of one row."""
    ends = batch.get("cu_seq_lens_q")
    if isinstance(ends, torch.Tensor):
        return max(1, ends.numel() - 1)
    positions = batch.get("position_ids")
    if not isinstance(positions, torch.Tensor):
        return 1
    known = integration.host_value(positions) if positions.is_cuda else positions
    # Padding at the end also has position 0, so sequences are counted by their second tokens.
    return 1 if known is None else max(1, int((known == 1).sum()))
