"""Fixtures that several test modules use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu
from maya_core.session.timing import ProgramTiming

os.environ["MAYA_WARNINGS_AS_ERRORS"] = (
    "1"  # also for programs that tests start: our C++ must compile without a warning
)

# The same examples in every run, so that a failure comes from a change and not from other random numbers.
settings.register_profile("maya", derandomize=True)
settings.load_profile("maya")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of an integration needs its framework."""
    for item in items:
        if "integrations" in item.path.parts:
            item.add_marker(pytest.mark.framework)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """One emulated H100, which is removed after the test."""
    gpu = find_gpu("h100")
    emulated = EmulatedDevice(gpu, 1, kernel_seconds=ProgramTiming(gpu).kernel_seconds)
    yield emulated
    emulated.remove()
