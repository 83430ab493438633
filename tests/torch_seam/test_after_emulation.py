"""What a program keeps of an emulation can be destroyed after it, with a CUDA build of torch on a machine without a driver, too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import torch, maya_core
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
with maya_core.emulate("h100", gpus_per_node=8) as job:
    dist.init_process_group("nccl")
    model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 64).cuda()).sum().backward()
        optimizer.step()
assert job.prediction.step_time_s
assert not torch.cuda.is_available()
del model, optimizer
print("done")
"""


def test_the_reducer_of_ddp() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, **rank}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
