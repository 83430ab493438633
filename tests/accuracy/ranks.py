"""One rank of a distributed training script (tests/collectives/workloads), emulated alone: its peaks and launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WORKLOADS = Path(__file__).parents[1] / "collectives/workloads"
STEP_LINE = '{"step"'


@dataclass(frozen=True)
class Rank:
    script: str
    variant: str
    gpu: str = "h100"
    ranks: int = 8
    rank: int = 0

    @property
    def command(self) -> list[str]:
        return [str(WORKLOADS / f"{self.script}.py"), self.variant]

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun would set, on nodes of 8. Flash attention, as an oracle has no cuDNN to prefer."""
        return {
            **os.environ,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank % 8),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(min(self.ranks, 8)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29555",
            "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
            "HF_HUB_OFFLINE": "1",
        }


@dataclass(frozen=True)
class Figures:
    first: tuple[int, int]  # peak allocated and reserved after the first step
    last: tuple[int, int]
    launches: int  # kernels, copies and memsets of the program, without those of NCCL

    @classmethod
    def of(cls, output: str, launches: int) -> Figures:
        steps = [json.loads(line) for line in output.splitlines() if line.startswith(STEP_LINE)]
        first, *_, last = [(step["allocated"], step["reserved"]) for step in steps]
        return cls(first, last, launches)


# A process of its own, as the figures are of one: peaks depend on everything the process allocated before.
# The emulated NCCL has no watchdog that a script would have to sleep for.
RUN = """
import runpy, sys, time
import maya_core
from maya_core.hardware.catalog import find_gpu
from maya_core.ops.plan import kernels_of
from maya_core.predictor.pricing import platform_of
time.sleep = lambda seconds: None
gpu, *sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
with maya_core.emulate(gpu, gpus_per_node=8) as job:
    runpy.run_path(sys.argv[0], run_name="__main__")
platform = platform_of(job.trace, find_gpu(gpu))
each = [len(kernels_of(call, platform)) for call in job.trace.calls]
print("launches", sum(each[number] for number in job.trace.ops["subject"]))
"""


def emulated(rank: Rank) -> Figures:
    done = subprocess.run(
        [sys.executable, "-c", RUN, rank.gpu, *rank.command],
        env=rank.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Figures.of(done.stdout, int(done.stdout.split()[-1]))
