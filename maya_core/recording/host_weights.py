"""Random weights of big models are not made on the host. A model is built there before it moves to its GPUs, and filling 7 billion
parameters takes minutes and 28 GB of memory, for values that nobody reads: torch.nn.init leaves large host tensors as
they were allocated, and pages that are never written take no memory.

What is filled in a moment is filled, as always: then random numbers drawn later, for data say, are those of the real run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import init

from maya_core.patches import Patches

LARGE = 2**20  # elements of a tensor that may be left out
FILLED = 2**27  # elements of such tensors that are filled first: a second or so, and all of a model of 100 million

_unfilled: dict[int, StorageWeakRef] = {}  # by the storage's address


def install(patches: Patches) -> None:
    budget = Budget()
    for name, function in list(vars(init).items()):
        if name.endswith("_") and not name.startswith("_") and callable(function):
            patches.set(init, name, _sparing(function, budget))
    patches.on_undo(_unfilled.clear)


def is_unfilled(storage: torch.UntypedStorage) -> bool:
    reference = _unfilled.get(storage._cdata)
    return reference is not None and not reference.expired()


class Budget:
    """How many elements are still filled."""

    def __init__(self) -> None:
        self._left = FILLED
        self._depth = 0

    def allows(self, elements: int) -> bool:
        if self._depth == 0:
            self._left -= elements
        return self._left >= 0

    def __enter__(self) -> None:
        self._depth += 1  # one initialization calls another: kaiming_uniform_ is a uniform_

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


def _sparing(original: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    @functools.wraps(original)
    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # A tensor class of somebody's own (DTensor, quantized) is theirs to fill.
        if (
            tensor.device.type != "cpu"
            or tensor.numel() < LARGE
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        ):
            return original(tensor, *args, **kwargs)
        if budget.allows(tensor.numel()):
            with budget:
                return original(tensor, *args, **kwargs)
        storage = tensor.untyped_storage()
        _unfilled[storage._cdata] = StorageWeakRef(storage)
        return tensor

    return fill
