"""Calls contain torch's switches, which decide the kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from maya_core.device.emulated import EmulatedDevice
from maya_core.device.planner import Planner
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import Gemm
from maya_core.ops.plan import kernels_of
from maya_core.ops.registry import PLANS, op
from maya_core.ops.work import Work
from maya_core.predictor.pricing import Predictor
from maya_core.trace.call import Call


@pytest.fixture
def allowing_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def recorded(device: EmulatedDevice) -> Call:
    x = torch.empty(512, 512, device="cuda")
    torch.mm(x, x)
    return device.planner.calls[-1]


def test_tf32_is_a_switch_of_the_call(device: EmulatedDevice, allowing_tf32: None) -> None:
    call = recorded(device)
    assert call.settings.as_json() == {"tf32_products": True}
    rates = {}
    for gpu in ("v100", "a100", "h100"):
        [kernel] = kernels_of(call, Platform(find_gpu(gpu)))
        assert isinstance(kernel, Gemm)
        rates[gpu] = kernel.dtype
    assert rates == {"v100": "float32", "a100": "tf32", "h100": "tf32"}


def test_without_it_products_are_float32(device: EmulatedDevice) -> None:
    [kernel] = kernels_of(recorded(device), Platform(find_gpu("a100")))
    assert isinstance(kernel, Gemm)
    assert kernel.dtype == "float32"


def test_other_switches_are_another_call(device: EmulatedDevice) -> None:
    x = torch.empty(8, 8, device="cuda")
    before = len(device.planner.calls)
    torch.mm(x, x)
    torch.backends.cudnn.benchmark = True
    try:
        torch.mm(x, x)
    finally:
        torch.backends.cudnn.benchmark = False
    torch.mm(x, x)
    assert [call.settings.benchmark for call in device.planner.calls[before:]] == [False, True]


def test_kernels_that_cannot_be_priced_are_told_when_they_are_described() -> None:
    @op("mylib::mistyped")
    def mistyped(call: Call, platform: Platform) -> Work:
        return Work().launch(Gemm("bf16", 1, 8, 8, 8))

    gpu = find_gpu("h100")
    try:
        with pytest.raises(MayaError, match="kernels described for mylib::mistyped cannot be priced: KeyError: 'bf16'"):
            Planner(gpu, kernel_seconds=lambda kernels: Predictor(gpu).kernels(kernels).seconds).plan(
                "mylib::mistyped", [], [], [("Float", (8, 8), (8, 1), "cuda")]
            )
    finally:
        del PLANS["mylib::mistyped"]
