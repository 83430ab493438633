"""Programs of many kinds stay on the path of a training that goes well, and no value is reported to steer them that does not."""

from __future__ import annotations

import pytest
from values.healthy_programs import PROGRAMS

import maya_core


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_false_caveat(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    with maya_core.emulate("h100", steps=3) as job:
        PROGRAMS[name]()
    prediction = job.prediction
    assert prediction.unknown_values == []
    assert prediction.memory.fits is True
    assert prediction.trace.steps == 3


def test_there_are_thirty_programs() -> None:
    assert len(PROGRAMS) >= 30
