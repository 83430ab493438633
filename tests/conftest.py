"""Fixtures that several test modules use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu

os.environ["MAYA_WARNINGS_AS_ERRORS"] = (
    "1"  # also for programs that tests start: our C++ must compile without a warning
)

# The same examples in every run, so that a failure comes from a change and not from other random numbers.
settings.register_profile("maya", derandomize=True)
settings.load_profile("maya")


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """One emulated H100, which is removed after the test."""
    emulated = EmulatedDevice(find_gpu("h100"), 1)
    yield emulated
    emulated.remove()
