"""Stand-ins for Triton kernels of Hugging Face's trainers, with the same launches and memory traffic. These kernels process a part of a
tensor at a time, which the core's general recording of kernels cannot know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration


class Launched:
    """Replaces a Triton kernel: `kernel[grid](...)` calls a function."""

    def __init__(self, function: Callable[..., None], on_launch: Callable[[], None]) -> None:
        self.function = function
        self.on_launch = on_launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        self.on_launch()
        return self.function


def read_logits(tile: torch.Tensor, _: int, targets: torch.Tensor, result: torch.Tensor, *args: Any, **kw: Any) -> None:
    """trl reduces a tile of logits to a few numbers per token: one pass that reads the tile."""
    torch.sum(tile, -1, dtype=result.dtype, out=result)


def rewrite_logits(tile: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """trl turns a tile of logits into its gradient: one pass that reads and writes the tile."""
    tile.neg_()


# module -> {kernel: stand-in}
STAND_INS: dict[str, dict[str, Callable[..., None]]] = {
    "trl.kernels.chunked_logprob": {"_forward_kernel": read_logits, "_backward_kernel": rewrite_logits},
}


def install(integration: Integration) -> None:
    patches = integration.patches

    def stand_in(kernels: dict[str, Callable[..., None]], module: ModuleType) -> None:
        for name, function in kernels.items():
            patches.set(module, name, Launched(function, functools.partial(integration.skip, _note(module))))

    for name, kernels in STAND_INS.items():
        patches.when_imported(name, functools.partial(stand_in, kernels))


def _note(module: ModuleType) -> str:
    return f"the Triton kernels of {module.__name__} are each assumed to be one pass over their data"
