"""Optimizers that step on the host, where the parameters were offloaded to: their work is in the trace, for the modelled host."""

from __future__ import annotations

import pytest
import torch

import maya_core
from maya_core.recording.steps import OP_BY_OP
from maya_core.trace.schema import EventKind


def steps(*, device: str, fused: bool = False) -> list[int]:
    """Bytes of host work in each of three steps of Adam on a million parameters, used on the GPU."""
    with maya_core.emulate("h100") as job:
        weight = torch.zeros(1000, 1000, device=device, requires_grad=True)
        unused = torch.zeros(500, 500, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([weight, unused], fused=fused)
        for _ in range(3):
            (weight.to("cuda") @ torch.ones(1000, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = job.trace.events
    return [int(a) for a in events["a"][events["kind"] == EventKind.HOST_WORK]]


@pytest.mark.parametrize(("fused", "slower"), [(True, 1.0), (False, OP_BY_OP)])
def test_an_offloaded_optimizer_goes_through_28_bytes_a_parameter(fused: bool, slower: float) -> None:
    assert steps(device="cpu", fused=fused) == [round(slower * 28 * 1_000_000)] * 3


def test_an_optimizer_on_the_device_does_nothing_on_the_host() -> None:
    assert steps(device="cuda") == []
