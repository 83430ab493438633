"""Every GPU of the catalog can run training, and has the properties of the catalog in the program."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
import maya_core
from maya_core.hardware.catalog import gpus

for gpu in gpus().values():
    with maya_core.emulate(gpu.name, gpus_per_node=2) as job:
        seen = torch.cuda.get_device_properties(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).cuda().half()
        q = torch.randn(1, 2, 16, 32, device="cuda", dtype=torch.float16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        model(torch.randn(8, 64, device="cuda").half()).sum().backward()
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        joined = pynvml.nvmlDeviceGetP2PStatus(handle, pynvml.nvmlDeviceGetHandleByIndex(1), 2) == 0
        architecture = pynvml.nvmlDeviceGetArchitecture(handle)
    assert (seen.name, seen.total_memory) == (gpu.driver_name, gpu.memory_bytes), gpu.name
    assert (seen.multi_processor_count, seen.major, seen.minor) == (gpu.sms, *gpu.compute_capability), gpu.name
    assert watts == gpu.power_limit_w, gpu.name
    assert architecture <= 10, gpu.name
    print(gpu.name, job.prediction.memory.ranks[0].fits, joined)
"""


def test_every_gpu_is_emulated() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 27
    assert all(fits == "True" for _, fits, _ in rows)
    joined = {name for name, _, by_nvlink in rows if by_nvlink == "True"}
    assert joined == {"h100", "h200", "b200", "b300", "gb200", "gb300", "a100", "a100-40gb", "v100", "v100-16gb"}
