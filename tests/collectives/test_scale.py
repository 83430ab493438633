"""Shortcuts for large worlds give the same results as torch."""

from __future__ import annotations

import sys

import pytest
import torch

import maya_core
from maya_core.collectives.scale import Chunks


@pytest.mark.parametrize("shape", [(10, 3), (8,), (768, 4), (1, 2), (0, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 16, 100])
def test_chunks_are_torchs(shape: tuple[int, ...], count: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    for dim in range(len(shape)):
        tensor = torch.randn(shape)
        ours, torchs = Chunks(tensor, count, dim), _chunk_with_empty(tensor, count, dim)
        assert len(ours) == len(torchs) == count
        for one, other in zip(ours, torchs, strict=True):
            assert torch.equal(one, other)


def test_chunks_of_fsdp_are_put_in_place_and_taken_away() -> None:
    import torch.distributed.fsdp  # noqa: F401

    module = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param"]
    before = module._chunk_with_empty
    with maya_core.emulate("h100"):
        assert module._chunk_with_empty is Chunks
    assert module._chunk_with_empty is before
