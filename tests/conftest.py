"""Fixtures that several test modules use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu
from maya_core.request import Request
from maya_core.session.timing import ProgramTiming

# The same examples in every run: a change that breaks a property is told apart from a run that drew other numbers.
settings.register_profile("maya", derandomize=True)
settings.load_profile("maya")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of an integration needs its framework."""
    for item in items:
        if "integrations" in item.path.parts:
            item.add_marker(pytest.mark.framework)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """One emulated H100, gone again after the test."""
    emulated = EmulatedDevice(find_gpu("h100"), 1, kernel_seconds=ProgramTiming(Request(gpu="h100")).kernel_seconds)
    yield emulated
    emulated.remove()
