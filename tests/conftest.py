"""Fixtures that several test modules use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    """One emulated H100, gone again after the test."""
    emulated = EmulatedDevice(find_gpu("h100"), 1)
    yield emulated
    emulated.remove()
