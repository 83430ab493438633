"""Micro-benchmarks: the kernel of each case, the timing loop with a simulated timer, and a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ops.oracle_figures import kernels_called

from maya_core.calibrate import cases, measure
from maya_core.device.emulated import EmulatedDevice
from maya_core.errors import MayaError
from maya_core.hardware.host_costs import KERNEL_GAP_S
from maya_core.ops.kernel import Gemm, Kernel
from maya_core.predictor import calibration_factors
from maya_core.predictor.pricing import Predictor


class ModelTimer:
    """A GPU that is slower than predicted by a tenth at first, by a fifth under load."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.predictor = Predictor(device.gpu)
        self.asked: list[Kernel] = []

    def time(self, call: Callable[[], Any], kernel: Kernel) -> measure.Timing:
        self.asked.append(kernel)
        seconds = float(self.predictor.kernels([kernel]).seconds[0])
        return measure.Timing(1.1 * seconds, 1.2 * seconds, 0.02, 40)


def test_every_case_is_the_kernel_that_the_device_records(device: EmulatedDevice) -> None:
    families = Counter[str]()
    for case in cases.cases(quick=True):
        call = case.make()
        assert isinstance(call, cases.OpCall)
        kernel = cases.kernel_of(device.gpu, call, call())
        launched = [each for each in kernels_called(device, call) if each.family != "included"]
        assert [kernel] == launched, case.name
        families[launched[0].family] += 1
    assert set(families) == {"gemm", "attention", "memory", "copy"}


def test_layouts_are_those_of_forward_and_gradients(device: EmulatedDevice) -> None:
    layouts = {}
    for layout in ("TN", "NN", "NT"):
        call = cases._product(layout, 512, 256, 128, cases.torch.bfloat16)()
        kernel = cases.kernel_of(device.gpu, call, call())
        assert kernel is not None
        layouts[layout] = kernel.sizes
    assert layouts == {name: (1, 512, 256, 128, number) for number, name in enumerate(("TN", "NN", "NT"))}


def test_a_run_measures_and_what_it_finds_corrects(device: EmulatedDevice) -> None:
    seen: list[str] = []
    timer = ModelTimer(device)
    outcome = measure.run(cases.cases(quick=True), device.gpu, timer, progress=seen.append)
    assert len(seen) == len(list(cases.cases(quick=True)))
    assert outcome.slowdown == pytest.approx(1.2 / 1.1)
    found = calibration_factors.make("mine", "h100", [], outcome.measured, [])
    assert found.factor_of["gemm", "bfloat16"].short == pytest.approx(1.2, rel=1e-3)
    row = found.measured[0]
    assert row.burst_seconds is not None and row.burst_seconds < row.seconds
    assert all(row.seconds >= measure.SHORTEST_S for row in found.measured)


def test_what_cannot_be_run_is_counted(device: EmulatedDevice) -> None:
    def not_here() -> Callable[[], Any]:
        raise RuntimeError("no cuDNN attention on this GPU")

    every = [
        cases.CalibrationCase("too large", not_here, 10**15),
        cases.CalibrationCase("not offered", not_here, 0),
        cases.CalibrationCase(
            "two kernels", lambda: cases.OpCall(cases.aten._softmax_backward_data.default, (x, x, -1, x.dtype)), 0
        ),
    ]
    x = cases._new(1024, 1024)
    outcome = measure.run(every, device.gpu, ModelTimer(device))
    assert outcome.measured == []
    assert outcome.skipped == {
        "do not fit into memory": 1,
        "are not supported by this GPU or torch": 1,
        "launch more than one kernel": 1,
    }


def test_burst_and_sustained_are_told_apart() -> None:
    """A GPU whose clock falls after half a second of work."""
    done = [0.0]

    def once(count: int) -> list[float]:
        each = []
        for _ in range(count):
            each.append(1e-3 if done[0] < 0.5 else 1.3e-3)
            done[0] += each[-1]
        return each

    timing = measure.sample(once, 2.0, clock=lambda: done[0])
    assert timing.burst == 1e-3
    assert timing.sustained == 1.3e-3
    assert timing.spread == 0 and timing.samples > 500


def test_a_long_kernel_is_run_often_enough_and_no_more() -> None:
    runs: list[int] = []

    def once(count: int) -> list[float]:
        runs.append(count)
        return [0.5] * count

    timing = measure.sample(once, 1.0, clock=lambda: float(sum(runs)))
    assert timing.sustained == 0.5 and sum(runs) == 3 + measure.BURST_RUNS + measure.LEAST_RUNS


def test_no_gpu() -> None:
    with pytest.raises(MayaError, match="has no CUDA GPU") as error:
        measure.require_gpu()
    assert "maya calibrate kineto" in error.value.advice


def test_an_emulated_gpu_is_not_measured(device: EmulatedDevice) -> None:
    with pytest.raises(MayaError, match="is emulated"):
        measure.require_gpu()


def test_nor_under_maya_run(tmp_path: Path) -> None:
    maya = str(Path(sys.executable).parent / "maya")
    environment = os.environ | {"MAYA_PROFILES": str(tmp_path / "profiles")}
    command = [maya, "run", "--out", str(tmp_path / "out"), "--", maya, "calibrate", "measure"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "the GPU of this process is emulated" in " ".join(done.stderr.split())
    assert not (tmp_path / "profiles").exists()


def test_events_are_recorded_around_each_call(device: EmulatedDevice) -> None:
    """The event timer's own code, on a device whose events answer with the predictor's time."""
    timer = measure.EventTimer(device.gpu.l2_bytes, sustain_s=0.0, rest_s=0.0)
    call = cases._product("TN", 4096, 4096, 4096, cases.torch.bfloat16)()
    product = Gemm("bfloat16", 1, 4096, 4096, 4096, 0)
    timing = timer.time(call, product)
    predicted = Predictor(device.gpu).kernels([product]).seconds[0] + KERNEL_GAP_S
    assert timing.sustained == pytest.approx(predicted, rel=0.01) and timing.burst == pytest.approx(predicted, rel=0.01)
    assert timing.samples == measure.LEAST_RUNS * measure.KEPT
