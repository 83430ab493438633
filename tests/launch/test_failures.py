"""Jobs that went wrong have no healthy prediction, however they end: not in the run, not in the report, not in a what-if."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
MAYA = str(Path(sys.executable).parent / "maya")

LOOP = """
import os, sys, torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(torch.randn(8, 512, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        {end}
"""

RANKS = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(torch.randn(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    if step == 1 and rank == 2:
        {end}
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MAYA, *words], cwd=folder, capture_output=True, text=True, timeout=300)


def predicted(folder: Path) -> dict:
    return json.loads((folder / "maya-out/latest/prediction.json").read_text())


@pytest.mark.parametrize(
    ("end", "code", "failure"),
    [
        ("raise RuntimeError('half way')", 1, "RuntimeError: half way"),
        ("os._exit(5)", 5, "it left by os._exit(5)"),
        ("sys.exit(4)", 4, "it ended with exit code 4"),
    ],
)
def test_a_program_that_fails_after_some_steps(tmp_path: Path, end: str, code: int, failure: str) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(end=end))
    done = run(tmp_path, "run", "--gpu", "h100", "--", sys.executable, "train.py")
    assert done.returncode == code
    prediction = predicted(tmp_path)
    assert prediction["trace"]["ended"] == "failed"
    assert prediction["memory"]["fits"] is None
    assert len(prediction["failures"]) == 1
    assert prediction["failures"][0].startswith(f"the program failed after 2 steps: {failure}")
    for shown in (
        done,
        run(tmp_path, "report", "maya-out", "--html", "page.html"),
        run(tmp_path, "what-if", "maya-out", "--gpu", "b200"),
    ):
        words = " ".join(shown.stdout.split())
        assert "THE JOB FAILED: the program failed after 2 steps" in words
        assert "not a healthy run" in words
    assert "The job failed" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("end", ["os._exit(7)", "sys.exit(7)", "raise ValueError('wrong')"])
def test_a_rank_that_fails_is_named(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(RANKS.format(end=end))
    done = run(
        tmp_path, "run", "--gpu", "h100", "--ranks", "all", "--", "torchrun", "--nproc-per-node", "4", "train.py"
    )
    assert done.returncode == (1 if "raise" in end else 7)
    prediction = predicted(tmp_path)
    assert prediction["trace"]["ended"] == "failed"
    assert prediction["failures"][0].startswith("rank 2 failed after 2 steps")
    assert prediction["memory"]["fits"] is None
    assert prediction["step_time_s"] is None, "the others would wait for it"
    assert "rank 2 failed" in " ".join(run(tmp_path, "report", "maya-out").stdout.split())


def test_a_killed_rank_leaves_no_prediction(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS.format(end="os.kill(os.getpid(), 9)"))
    done = run(
        tmp_path, "run", "--gpu", "h100", "--ranks", "all", "--", "torchrun", "--nproc-per-node", "4", "train.py"
    )
    assert done.returncode == 2
    assert "rank 2 was killed by signal 9" in done.stderr
    assert not (tmp_path / "maya-out/latest/prediction.json").exists()
    assert run(tmp_path, "report", "maya-out").returncode == 2
