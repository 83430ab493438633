"""Isolates the catalog from the developer's own hardware file, and provides a way to set one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MAYA_HARDWARE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Writes hardware.toml in the current folder and makes it the user's own file."""

    def write(text: str) -> Path:
        path = tmp_path / "hardware.toml"
        path.write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MAYA_HARDWARE", str(path))
        return path

    return write
