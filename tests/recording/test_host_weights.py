"""Under `maya run`, large weights on the host are not filled and small ones are. Afterwards all are filled again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maya_core.device.emulated import EmulatedDevice
from maya_core.patches import Patches
from maya_core.recording import host_weights


def test_large_weights_are_left_as_allocated(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_weights, "FILLED", 0)
    before = dict(vars(nn.init))
    patches = Patches()
    host_weights.install(patches, device.native)
    try:
        large, small = nn.Linear(2048, 1024), nn.Linear(16, 16)
        assert device.native.is_made_up(large.weight.untyped_storage())
        assert not device.native.is_made_up(small.weight.untyped_storage())
        assert small.weight.std() > 0.05
        nn.init.normal_(large.weight)
        meta = nn.Linear(4096, 4096, device="meta")
        assert meta.weight.is_meta
    finally:
        patches.undo()
    assert dict(vars(nn.init)) == before
    assert abs(nn.init.normal_(torch.empty(2048, 1024)).std() - 1) < 0.01


def test_the_first_of_them_are_filled_and_draw_their_random_numbers(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kaiming_uniform_, which fills a Linear, calls uniform_: that is one filling."""
    monkeypatch.setattr(host_weights, "FILLED", 3 * 1024 * 1024)
    torch.manual_seed(0)
    nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    expected = torch.randn(3)
    patches = Patches()
    host_weights.install(patches, device.native)
    try:
        torch.manual_seed(0)
        layers = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        assert torch.equal(torch.randn(3), expected)
        beyond = nn.Linear(2048, 1024)
    finally:
        unfilled = [device.native.is_made_up(layer.weight.untyped_storage()) for layer in (*layers, beyond)]
        patches.undo()
    assert unfilled == [False, False, True]
