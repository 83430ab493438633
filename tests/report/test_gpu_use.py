"""GPUs that do nothing, and ranks that train apart, are counted and told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maya_core.device.visible import visible_gpus

MAYA = str(Path(sys.executable).with_name("maya"))
pytestmark = pytest.mark.slow
TRAIN = """
import os, sys
SET_BEFORE
import torch
SET_AFTER
print("sees", torch.cuda.device_count())
local = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(local)
model = torch.nn.Linear(64, 64).cuda()
INIT
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = """
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(model)
"""
SEES_TWO = "os.environ['CUDA_VISIBLE_DEVICES'] = '2,3'"


def run(
    folder: Path, *command: str, init: str = "", before: str = "", after: str = "", **variables: str
) -> dict[str, Any]:
    """The prediction, with what was printed."""
    text = TRAIN.replace("SET_BEFORE", before).replace("SET_AFTER", after).replace("INIT", init)
    (folder / "train.py").write_text(text)
    words = [sys.executable if word == "python" else word for word in command]
    done = subprocess.run(
        [MAYA, "run", "--json", "p.json", *words, "train.py"], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "p.json").read_text())
    return {**found, "output": done.stdout + done.stderr}


@pytest.mark.parametrize(
    ("options", "settings", "sees", "size", "idle"),
    [
        (("--gpus-per-node", "8", "--", "python"), {}, 8, 8, 7),
        (("--gpus-per-node", "8", "--", "python"), {"before": SEES_TWO}, 2, 8, 7),
        (("--gpus-per-node", "8", "--", "python"), {"after": SEES_TWO}, 2, 8, 7),
        (("--gpus-per-node", "8", "--", "env", "CUDA_VISIBLE_DEVICES=4,5,6", "python"), {}, 3, 8, 7),
        (("--", "python"), {"before": SEES_TWO}, 2, 2, 1),
        (("--", "python"), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, 4, 3),
        (("--", "python"), {}, 1, 1, 0),
        (("--", "python"), {"CUDA_VISIBLE_DEVICES": ""}, 1, 1, 0),  # of this machine, and ignored with a line
        (("--", "torchrun", "--nproc-per-node", "4"), {"init": DDP}, 4, 4, 0),
        (("--gpus-per-node", "8", "--", "torchrun", "--nproc-per-node", "2"), {"init": DDP}, 8, 2, 6),
    ],
)
def test_gpus_that_are_seen_and_that_do_nothing(
    tmp_path: Path, options: tuple[str, ...], settings: dict[str, str], sees: int, size: int, idle: int
) -> None:
    found = run(tmp_path, *options, **settings)
    assert f"sees {sees}\n" in found["output"]
    assert (found["world"]["size"], found["world"]["idle_gpus"]) == (size, idle)
    used = size if "torchrun" in options else 1
    told = [caveat for caveat in found["caveats"] if "did nothing" in caveat]
    assert [caveat.split(" GPUs did nothing")[0] for caveat in told] == ([f"{idle} of {idle + used}"] if idle else [])


def test_ranks_that_never_communicate(tmp_path: Path) -> None:
    found = run(tmp_path, "--", "torchrun", "--nproc-per-node", "4")
    assert any("4 ranks never communicate" in caveat for caveat in found["caveats"])
    together = run(tmp_path, "--", "torchrun", "--nproc-per-node", "4", init=DDP)
    assert not any("never communicate" in caveat for caveat in together["caveats"])


@pytest.mark.parametrize(
    ("value", "node", "count"),
    [
        (None, 8, None), ("", 8, None), ("-1", 8, None), ("0", 8, 1), ("0,1,2,3", 8, 4), ("6,7,8", 8, 2), ("0,-1,2", 8, 1),
        ("1,1", 8, 1), ("4,5", None, 2), (" 2 , 3 ", 8, 2), ("GPU-8932f937,GPU-1", 8, 2), ("x", 8, None),
    ],
)  # fmt: skip
def test_the_variable_is_read_as_cuda_reads_it(value: str | None, node: int | None, count: int | None) -> None:
    assert visible_gpus(value, node) == count
