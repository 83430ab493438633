"""Compiled training gives the Triton kernels, products, launches and peak memory of real CUDA PyTorch. These are the scripts that need no other
library; tests/accuracy/compile_against_oracle.py runs all of them, and the CUDA build.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))
from compile_against_oracle import emulated

from maya_core.cpp_build import cache_folder

pytestmark = pytest.mark.slow

with (Path(__file__).parent / "data/oracle.csv").open() as file:
    ORACLE = {row["script"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("script", ["adamw", "ddp", "flex_attention"])
def test_kernels_and_memory_are_those_of_cuda_torch(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts with an empty cache of inductor, as the oracle did."""
    for entry in cache_folder().iterdir():
        if entry.name != "inductor":
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setenv("MAYA_CACHE_DIR", str(tmp_path))
    told = ORACLE[script]
    ours = emulated(script, told["layers"], told["gpu"])
    assert [one.name for one in ours.triton] == told["triton"].split()
    assert (ours.products, ours.launches) == (int(told["products"]), int(told["launches"]))
    assert ours.allocated == int(told["allocated"])
