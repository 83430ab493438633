"""Values that come from the host, and all that is computed from them, are true when they are read, at any size."""

from __future__ import annotations

import pytest
from values.host_data_programs import PROGRAMS

import maya_core


@pytest.mark.parametrize("name", PROGRAMS)
def test_emulated_program_reads_what_the_cpu_computes(name: str) -> None:
    expected = PROGRAMS[name]("cpu")
    with maya_core.emulate("h100") as job:
        found = PROGRAMS[name]("cuda")
    assert found == expected
    assert not job.prediction.unknown_values
    assert job.prediction.memory.fits is True


def test_there_are_forty_programs() -> None:
    assert len(PROGRAMS) >= 40
