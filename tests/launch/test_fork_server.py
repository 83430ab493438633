"""Ranks that are forked from a process that has imported torch. Their program sees no difference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")

LOOKS_AROUND = """
import os, sys
before = "torch" in sys.modules
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
from torch.nn import Linear
import torch, __main__
layer = Linear(1024, 1024).cuda()
expandable = torch.cuda.memory_snapshot()[0]["is_expandable"]
print("sees", before, __name__, __file__, __main__.before, sys.argv, sys.path[0] == os.getcwd(), os.environ["RANK"], expandable)
"""


def maya(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = [MAYA, "run", "--ranks", "0,1", "--", "torchrun", "--nproc-per-node", "2", "train.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_forked_rank_sees_what_a_started_one_does(tmp_path: Path) -> None:
    done = maya(tmp_path, LOOKS_AROUND, "--size", "3")
    assert done.returncode == 0, done.stderr
    seen = f"sees False __main__ {tmp_path}/train.py False ['train.py', '--size', '3'] True {{rank}} True"
    assert seen.format(rank=0) in done.stdout.splitlines()
    assert "[rank 1] " + seen.format(rank=1) in done.stdout.splitlines()


def test_how_a_forked_rank_ends_is_told(tmp_path: Path) -> None:
    done = maya(tmp_path, "import os, sys, torch\nif os.environ['RANK'] == '1': sys.exit(7)")
    assert done.returncode == 7
    failed = maya(tmp_path, "import os, torch\nif os.environ['RANK'] == '1': raise ValueError('no')")
    assert failed.returncode == 1
    told = [line for line in failed.stderr.splitlines() if line.startswith("[rank 1] ")]
    assert told[0] == "[rank 1] Traceback (most recent call last):" and told[-1] == "[rank 1] ValueError: no"
    assert 'File "' in told[1] and "train.py" in told[1]


def test_stacks_of_forked_ranks_begin_in_their_program(tmp_path: Path) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
dist.all_reduce(torch.ones(dist.get_rank() + 1, device="cuda"))
"""
    done = maya(tmp_path, text)
    assert done.returncode == 3
    assert "forked.py" not in done.stdout and "forked.py" not in done.stderr
    assert "train.py:5" in done.stdout + done.stderr
