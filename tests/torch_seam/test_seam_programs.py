"""Every supported version of torch predicts what the compared version does, where torch itself does the same."""

from __future__ import annotations

import pytest
from seam_programs import PROGRAMS, expected_figures, figures_of

from maya_core.torch_seam.version import installed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", PROGRAMS)
def test_predictions_are_those_of_the_compared_version(name: str) -> None:
    expected = expected_figures(name, installed().version)
    assert figures_of(PROGRAMS[name]) == {figure: pytest.approx(value, rel=0.01) for figure, value in expected.items()}
