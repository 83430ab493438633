"""Small training runs have the peaks and kernel counts of real CUDA torch 2.13 over a fake runtime (data/oracle_more.csv)."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FIGURES = list(csv.DictReader((HERE / "data/oracle_more.csv").open()))

# Runs in its own process, as the figures were measured: peaks depend on everything that the process allocated before.
RUN = """
import json, runpy, sys
import numpy as np
import torch
from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu
from maya_core.ops.plan import kernels_of
from maya_core.trace.schema import EVENT, EventKind
device = EmulatedDevice(find_gpu(sys.argv[2]), 1)
device.native.start_recording()
runpy.run_path(sys.argv[1])
events = np.frombuffer(device.native.take_events(), EVENT)
each = [len(kernels_of(call, device.planner.platform)) for call in device.planner.calls]
launches = sum(each[i] for i in events[events["kind"] == EventKind.OP]["subject"])
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), launches]))
"""


@pytest.mark.parametrize("figures", FIGURES, ids=[f"{row['name']}-{row['gpu']}" for row in FIGURES])
def test_a_training_run_is_what_cuda_torch_does(figures: dict[str, str]) -> None:
    script = HERE / "workloads" / f"{figures['name']}.py"
    # The figures are of flash attention, and of a torch that keeps cuBLAS's workspaces.
    environment = {**os.environ, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1", "TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, script, figures["gpu"]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    allocated, reserved, launches = json.loads(done.stdout.splitlines()[-1])
    assert {"allocated": allocated, "reserved": reserved, "launches": launches} == {
        name: int(figures[name]) for name in ("allocated", "reserved", "launches")
    }
