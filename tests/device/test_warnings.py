"""A warning in our C++ fails the build when MAYA_WARNINGS_AS_ERRORS is set, as it is for the tests, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from maya_core.cpp_build import WARNINGS, run_compiler
from maya_core.errors import MayaError

pytestmark = pytest.mark.slow


def test_a_warning_is_an_error_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "unused.cpp"
    source.write_text("int answer(int unused) { return 42; }\n")
    command = [*WARNINGS, "-c", str(source), "-o", str(tmp_path / "unused.o")]
    with pytest.raises(MayaError, match="unused parameter"):
        run_compiler(command, "the answer")
    assert not (tmp_path / "unused.o").exists()
    monkeypatch.delenv("MAYA_WARNINGS_AS_ERRORS")
    run_compiler(command, "the answer")
    assert (tmp_path / "unused.o").exists()
