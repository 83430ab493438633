"""The native device is built once, even if several processes need it at the same time, and a failed build is explained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import maya_core
from maya_core.device import build
from maya_core.torch_seam.version import Torch

pytestmark = pytest.mark.slow

BUILD = """
import ctypes
from pathlib import Path
from maya_core.cpp_build import compiled, run_compiler

def compile_in(folder: Path, binary: Path) -> None:
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    run_compiler(["-shared", "-fPIC", str(folder / "answer.cpp"), "-o", str(binary)], "the answer")

print(ctypes.CDLL(str(compiled("key", "answer.so", "compiling the answer", compile_in))).answer())
"""


def test_two_programs_at_once_build_once(tmp_path: Path) -> None:
    env = {**os.environ, "MAYA_CACHE_DIR": str(tmp_path)}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [program.communicate(timeout=600) for program in programs]
    assert [program.returncode for program in programs] == [0] * 4
    assert [out.strip() for out, _ in outputs] == ["42"] * 4
    assert sum("maya: compiling the answer" in error for _, error in outputs) == 1
    assert len(list(tmp_path.glob("*/*.so"))) == 1


def test_no_compiler_is_said_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAYA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "_native", None)
    with pytest.raises(maya_core.MayaError, match=r"'no-such-compiler' was not found[\s\S]*apt-get install g\+\+"):
        build.native()
    assert not list(tmp_path.glob("*/*.so"))


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0+cu130", "3.0.0"])
def test_other_torch_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(
        maya_core.MayaError, match=rf"torch {re.escape(version)} is not supported.* torch 2\.10 to 2\.15"
    ):
        Torch(version, Path(), None).check()


@pytest.mark.parametrize("version", ["2.10.0", "2.13.1+cpu", "2.15.0+cu132"])
def test_supported_torch_versions(version: str) -> None:
    Torch(version, Path(), None).check()


def test_a_command_is_started_and_priced_without_torch(tmp_path: Path) -> None:
    """Only the program needs it: `maya run` and `maya report` would wait a second for their own."""
    program = tmp_path / "train.py"
    program.write_text("import torch\nfor _ in range(2):\n    torch.ones(8, device='cuda').sum()\n")
    command = ["run", "--steps", "all", "--out", str(tmp_path / "out"), "--html", str(tmp_path / "page.html")]
    told = f"""
import sys
from maya_core.cli import entry
sys.argv = {["maya", *command, "--", "python", str(program)]}
try:
    entry()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=300, check=False)
    assert (tmp_path / "page.html").exists(), done.stderr
    assert done.stdout.splitlines()[-1] == "False"
