"""Every supported version of torch predicts what the compared version does, where torch itself does the same."""

from __future__ import annotations

import json

import pytest
import seam_programs

pytestmark = pytest.mark.slow

EXPECTED = json.loads(seam_programs.FIGURES.read_text())


@pytest.mark.parametrize("name", seam_programs.PROGRAMS)
def test_predictions_are_those_of_the_compared_version(name: str) -> None:
    found = seam_programs.figures_of(seam_programs.PROGRAMS[name])
    assert found == {figure: pytest.approx(value, rel=0.01) for figure, value in EXPECTED[name].items()}
