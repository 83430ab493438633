"""A framework's log lines with predicted numbers in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import maya_core
from maya_core.pipeline import analyse
from maya_core.report.framework_log import Filled, framework_log


@pytest.mark.parametrize(
    ("number", "written"), [(1.5e12, "1.5 T"), (46_340_000_000, "46.34 G"), (12, "12 "), (0.0016, "1.6 m"), (0, "0 u")]
)
def test_prefixes(number: float, written: str) -> None:
    assert f"{Filled(number):si}" == written
    assert f"{Filled(number):.1f}" == f"{number:.1f}"


def test_spans_are_between_events() -> None:
    with maya_core.emulate("h100", steps=3) as job:
        native = job.emulation.device.native
        weight = torch.zeros(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        while True:
            places = []
            for _ in range(2):
                for work in (lambda: None, lambda: weight @ weight):
                    result = work()
                    torch.cuda.Event(enable_timing=True).record()
                    places.append(native.event_count() - 1)
            pairs = [tuple(places[:2]), tuple(places[2:])]
            job.emulation.log["products"] = {
                "text": "{ms[0]:.6f} ms, {seconds[0]:si}s, {rates[0]:si}FLOPS, {step_ms:.4f}, {rates[1]:.4f}",
                "spans": [pairs],
                "work": [(2e3 * 2 * 4096**3, [0]), 1.0],
            }
            job.emulation.log["later"] = {"text": "{ms[0]}", "spans": [[(places[0], 10**9)]]}
            result.sum().backward()
            optimizer.step()
    analysis = analyse(job.job)
    (line,) = framework_log(analysis)  # the other's events were not recorded
    ms, seconds, rate, step_ms, steps_per_ms = line.split(", ")
    taken = float(ms.removesuffix(" ms"))
    product = 2 * 4096**3 / (taken / 2 / 1e3)
    assert 0.3 * 989e12 < product < 989e12  # of two products, at what an H100 reaches
    assert float(seconds.split()[0]) == pytest.approx(taken * (1e3 if "us" in seconds else 1), abs=0.01)
    assert float(rate.split()[0]) == pytest.approx(product / 1e12, rel=0.01)
    assert taken < float(step_ms) == pytest.approx(job.prediction.step_time_s * 1e3, abs=1e-3)
    assert float(steps_per_ms) == pytest.approx(1 / float(step_ms), rel=1e-3)

    hung = replace(analysis, timeline=None)
    assert framework_log(hung) == []
