"""The example of docs/extending.md: a program describes its own op, with shape, kernels and duration, in one short file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maya_core.hardware.catalog import find_gpu
from maya_core.ops.kernel import Streaming
from maya_core.predictor.pricing import Predictor
from maya_core.trace.rank import read_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/own_op.py"
LONGEST = 20


def predicted(gpu: str, folder: Path) -> dict[str, object]:
    maya = Path(sys.executable).parent / "maya"
    answer = folder / f"{gpu}.json"
    command = [maya, "run", "--gpu", gpu, "--out", folder / gpu, "--json", answer, "--", sys.executable, EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([4096, 8])" in done.stdout
    found: dict[str, object] = json.loads(answer.read_text())
    return found


def test_the_example_is_short_and_in_the_docs() -> None:
    text = EXAMPLE.read_text()
    assert len(text.rstrip().splitlines()) <= LONGEST
    shown = (ROOT / "docs/extending.md").read_text()
    assert "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True)).rstrip() in shown


@pytest.mark.parametrize(("gpu", "timed"), [("h100", 12e-6), ("a100", 20e-6)])
def test_it_is_priced_as_described(tmp_path: Path, gpu: str, timed: float) -> None:
    prediction = predicted(gpu, tmp_path)
    [row] = [row for row in prediction["top_kernels"] if row["name"] == "mylib::route"]  # type: ignore[attr-defined]
    reduction = Streaming("reduction", 4096 * 128 * 4, 4096 * 8 * 4, 4096 * 8, 128)
    assert row["seconds"] == pytest.approx(timed + Predictor(find_gpu(gpu)).kernels([reduction]).seconds[0], rel=1e-6)
    assert row["family"] == "timed"
    assert prediction["unknown_ops"] == []
    [call] = [
        call for call in read_trace(tmp_path / gpu / "latest" / "rank-00000.trace").calls if call.op == "mylib::route"
    ]
    assert call.flops == 2 * 4096 * 128 * 8  # which another process cannot compute
