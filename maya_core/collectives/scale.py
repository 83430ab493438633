"""Replaces work that torch does for every rank of the world by work for the ranks that it looks at.

A world of 16,384 ranks must not cost more than one of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from maya_core.patches import Patches
from maya_core.torch_seam.distributed import CHUNK_WITH_EMPTY


class Chunks(Sequence[torch.Tensor]):
    """The result of torch.chunk, padded with empty tensors to `count`. Each chunk is made when it is read."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self.tensor = tensor
        self.pieces = count
        self.dim = dim
        self.each = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self.pieces

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self.pieces))]
        start = range(self.pieces)[index] * self.each
        left = self.tensor.size(self.dim) - start
        if left <= 0 < self.tensor.size(self.dim):
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.each, left))  # an empty tensor has only empty chunks


def install(patches: Patches) -> None:
    CHUNK_WITH_EMPTY.replace(patches, Chunks)
