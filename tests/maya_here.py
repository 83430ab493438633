"""Runs `maya`'s console script in this process, for commands that are refused before anything starts. A new process would take seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from maya_core import cli


class Refusal(NamedTuple):
    exit_code: int
    stderr: str  # in one line


def refused(*arguments: str, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["maya", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.entry()
    code = ended.value.code
    assert isinstance(code, int)
    return Refusal(code, " ".join(capsys.readouterr().err.split()))
