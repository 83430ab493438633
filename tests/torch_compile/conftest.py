"""Resets dynamo after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """What a test compiled must not be reused by another."""
    yield
    torch._dynamo.reset()
