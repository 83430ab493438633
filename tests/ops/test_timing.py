"""A program that times its GPU reads predicted time, from the predictor and the host model, not the speed of the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.host_costs import CALL_S, DISPATCH_S, KERNEL_GAP_S, LAUNCH_S
from maya_core.ops.kernel import Gemm, Kernel, Streaming
from maya_core.predictor.pricing import Predictor

FORWARD_S = DISPATCH_S["FORWARD"] + LAUNCH_S  # of the host, for an op with one kernel
PRODUCT = Gemm("bfloat16", 1, 8192, 8192, 8192, 1)
ADD = Streaming("elementwise", 2 * 4 * 1024, 4 * 1024, 1024)


def alone(device: EmulatedDevice, kernel: Kernel) -> float:
    """The seconds of one kernel in a queue, with the gap before the next one."""
    return float(Predictor(device.gpu).kernels([kernel]).seconds[0]) + KERNEL_GAP_S


def timed(run: Callable[[], object]) -> float:
    """The seconds between two events before and after `run`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def square() -> torch.Tensor:
    return torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")


def test_products_take_what_is_predicted(device: EmulatedDevice) -> None:
    a = square()
    each = alone(device, PRODUCT)
    assert each > 100 * FORWARD_S  # the host is far ahead
    assert timed(lambda: [a @ a for _ in range(10)]) == pytest.approx(10 * each, rel=0.01)
    assert timed(lambda: [a @ a for _ in range(20)]) == pytest.approx(20 * each, rel=0.01)


def test_tiny_kernels_take_what_the_host_takes(device: EmulatedDevice) -> None:
    x = torch.empty(1024, device="cuda")
    assert alone(device, ADD) < FORWARD_S
    assert timed(lambda: [x + x for _ in range(100)]) == pytest.approx(100 * FORWARD_S, rel=0.01)


def test_backward_ops_cost_the_host_less(device: EmulatedDevice) -> None:
    x = torch.empty(1024, device="cuda", requires_grad=True)
    y = x
    for _ in range(100):
        y = y.sin()
    grad = torch.empty_like(y)
    cosine_and_product = 2 * (DISPATCH_S["BACKWARD"] + LAUNCH_S)
    assert timed(lambda: torch.autograd.grad(y, x, grad)) == pytest.approx(100 * cosine_and_product, rel=0.02)


def test_work_on_two_streams_overlaps(device: EmulatedDevice) -> None:
    a, sides = square(), [torch.cuda.Stream(), torch.cuda.Stream()]
    current = torch.cuda.current_stream()

    def on_sides() -> None:
        for side in sides:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(5):
                    a @ a
        for side in sides:
            current.wait_stream(side)

    assert timed(on_sides) == pytest.approx(5 * alone(device, PRODUCT), rel=0.01)


def test_a_stream_waits_for_another(device: EmulatedDevice) -> None:
    a, side = square(), torch.cuda.Stream()
    current = torch.cuda.current_stream()

    def one_after_the_other() -> None:
        for _ in range(5):
            a @ a
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(5):
                a @ a
        current.wait_stream(side)

    assert timed(one_after_the_other) == pytest.approx(10 * alone(device, PRODUCT), rel=0.01)


def test_an_event_that_nothing_waits_for_does_not_stop_the_next(device: EmulatedDevice) -> None:
    a, side = square(), torch.cuda.Stream()

    def left_alone() -> None:
        with torch.cuda.stream(side):
            for _ in range(5):
                a @ a
        a @ a

    assert timed(left_alone) == pytest.approx(alone(device, PRODUCT), rel=0.1)  # five launches later


@pytest.mark.parametrize("wait", [torch.cuda.synchronize, lambda: torch.cuda.current_stream().synchronize()])
def test_a_host_that_waits_falls_behind(device: EmulatedDevice, wait: Callable[[], None]) -> None:
    a, x = square(), torch.empty(1024, device="cuda")

    def waits_between() -> None:
        a @ a
        wait()
        x + x

    expected = FORWARD_S + alone(device, PRODUCT) + CALL_S["DEVICE_SYNC"] + FORWARD_S + alone(device, ADD)
    assert timed(waits_between) == pytest.approx(expected, rel=1e-3)


def test_a_replayed_graph_takes_its_kernels_time(device: EmulatedDevice) -> None:
    a, x = square(), torch.empty(1024, device="cuda")
    graph, tiny = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    device.native.start_recording()  # a graph replays what was recorded during its capture
    with torch.cuda.graph(graph):
        for _ in range(10):
            a @ a
    with torch.cuda.graph(tiny):
        for _ in range(100):
            x + x
    assert timed(graph.replay) == pytest.approx(10 * alone(device, PRODUCT), rel=0.01)
    launched_at_once = CALL_S["GRAPH_LAUNCH"] + 100 * alone(device, ADD)
    assert timed(tiny.replay) == pytest.approx(launched_at_once, rel=0.01)
    assert launched_at_once < 50 * FORWARD_S


def test_capturing_takes_no_time_on_the_device(device: EmulatedDevice) -> None:
    a = square()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for _ in range(10):
                a @ a

    assert timed(capture) < 0.1 * 10 * alone(device, PRODUCT)


def test_a_program_that_times_nothing_prices_nothing(device: EmulatedDevice) -> None:
    timing = device.planner.kernel_seconds.__self__  # type: ignore[union-attr]
    x = torch.empty(64, 64, device="cuda", requires_grad=True)
    before, after = torch.cuda.Event(), torch.cuda.Event()
    before.record()
    (x @ x).sum().backward()
    after.record()
    torch.cuda.synchronize()
    assert len(device.planner.calls) > 3
    assert "_predictor" not in vars(timing)
    timed(lambda: x + x)
    assert "_predictor" in vars(timing)


def test_time_is_the_same_however_slow_the_emulator_is(device: EmulatedDevice) -> None:
    """The first run plans and prices every call; the second run has them cached."""
    a, x = square(), torch.empty(1024, device="cuda")

    def step() -> None:
        for _ in range(3):
            a @ a
            torch.relu(x).sum()
        torch.cuda.synchronize()

    assert timed(step) == pytest.approx(timed(step), rel=1e-6)
