"""Compiled code of the tests goes to a folder of their own, which one run of the tests shares: cold where a test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """What a test compiled is no other's."""
    yield
    torch._dynamo.reset()
