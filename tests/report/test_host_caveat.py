"""Host work that no model of the host knows is told, with the seconds that were seen."""

from __future__ import annotations

import re
import time

import torch
from torch import nn

import maya_core


def seen(prediction: maya_core.Prediction) -> float:
    """The seconds in the caveat; 0 without one."""
    for caveat in prediction.caveats:
        if found := re.search(r"the program itself spent about ([\d.]+) (m?s) of each step on this host", caveat):
            return float(found[1]) * {"s": 1.0, "ms": 1e-3}[found[2]]
    return 0.0


def trained(seconds: float, **options: str) -> maya_core.Prediction:
    with maya_core.emulate("h100", steps=3, **options) as job:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            time.sleep(seconds)
            loss = model(torch.randn(8, 64, device="cuda")).mean()
            loss.backward()
            optimizer.step()
    return job.prediction


def test_seconds_of_host_work_are_told() -> None:
    prediction = trained(0.2)
    assert 0.15 <= seen(prediction) <= 0.4
    assert prediction.step_time_s is not None and prediction.step_time_s < 1e-3
    assert any("--host measured does" in caveat for caveat in prediction.caveats)


def test_a_program_that_only_computes_has_no_such_caveat() -> None:
    assert seen(trained(0.0)) == 0.0


def test_measured_host_time_includes_them() -> None:
    prediction = trained(0.2, host="measured")
    assert seen(prediction) == 0.0
    assert prediction.step_time_s is not None and 0.15 < prediction.step_time_s < 1.0


def test_what_the_emulation_itself_computes_is_not_the_programs() -> None:
    """Eight million labels are sorted by the host for `unique`, in each step."""
    with maya_core.emulate("h100", steps=3) as job:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        labels = torch.randint(0, 19, (2**23,))
        while True:
            labels.cuda().unique()
            model(torch.randn(8, 64, device="cuda")).mean().backward()
            optimizer.step()
    assert seen(job.prediction) == 0.0
