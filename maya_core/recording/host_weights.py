"""Skips the initialization of large weights on the host. A model is built there before it moves to its GPUs. Filling 7 billion
parameters takes minutes and 28 GB of memory, for values that nobody reads. torch.nn.init therefore leaves large host tensors as they
were allocated; pages that are never written need no memory.

Small models are initialized as usual, so that random numbers that are drawn later, for example for data, are those of the real run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn import init

from maya_core.patches import Patches

LARGE = 2**20  # the initialization of tensors with at least this many elements may be skipped
FILLED = 2**27  # elements of large tensors that are still initialized, which takes about a second


def install(patches: Patches, native: ModuleType) -> None:
    budget = Budget()
    for name, function in list(vars(init).items()):
        if name.endswith("_") and not name.startswith("_") and callable(function):
            patches.set(init, name, _skipping_large(function, budget, native))


class Budget:
    """The number of elements that are still initialized."""

    def __init__(self) -> None:
        self._left = FILLED
        self._depth = 0

    def allows(self, elements: int) -> bool:
        if self._depth == 0:
            self._left -= elements
        return self._left >= 0

    def __enter__(self) -> None:
        self._depth += 1  # an initialization may call another one, as kaiming_uniform_ calls uniform_

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


def _skipping_large(original: Callable[..., Any], budget: Budget, native: ModuleType) -> Callable[..., Any]:
    @functools.wraps(original)
    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Other tensor classes (DTensor, quantized) are initialized as usual.
        if (
            tensor.device.type != "cpu"
            or tensor.numel() < LARGE
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        ):
            return original(tensor, *args, **kwargs)
        if budget.allows(tensor.numel()):
            with budget:
                return original(tensor, *args, **kwargs)
        native.mark_made_up(tensor.untyped_storage())
        return tensor

    return fill
