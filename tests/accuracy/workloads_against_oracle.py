"""Peaks and launches of the small training runs in tests/device/workloads, as Maya predicts them and as real CUDA PyTorch has them.

    python tests/accuracy/workloads_against_oracle.py RUN [--write]

RUN is a command that runs a script on real CUDA PyTorch, of the same version as here, over a fake CUDA runtime. ORACLE_SM and ORACLE_SMS
tell it the compute capability and the number of SMs. It writes one line on stderr, `ORACLE {...}`, with max_memory_allocated,
max_memory_reserved, launches, gemms, cudnn, memsets and memcpys. With --write the figures are kept for tests/device/test_workloads.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cuda_runs import check_version, on_cuda
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))
from device import workload_figures

from maya_core.hardware.catalog import find_gpu
from maya_core.torch_seam.version import installed

LAUNCHES = ("launches", "gemms", "cudnn", "memsets", "memcpys")


def real(run: str, script: Path, gpu: str) -> workload_figures.Figures:
    found = find_gpu(gpu)
    major, minor = found.compute_capability
    done = on_cuda(run, script, ORACLE_SM=f"{major}{minor}", ORACLE_SMS=str(found.sms))
    line = next(line for line in done.stderr.splitlines() if line.startswith("ORACLE "))
    figures = json.loads(line.removeprefix("ORACLE "))
    return workload_figures.Figures(
        figures["max_memory_allocated"], figures["max_memory_reserved"], sum(figures[name] for name in LAUNCHES)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    check_version(given.run)
    cases = [(script, gpu) for script in workload_figures.SCRIPTS for gpu in workload_figures.GPUS]
    truth = {(script.stem, gpu): real(given.run, script, gpu) for script, gpu in track(cases, "On CUDA PyTorch")}
    different = 0
    for script, gpu in track(cases, "Emulating"):
        ours, theirs = workload_figures.emulated(script, gpu), truth[script.stem, gpu]
        if ours != theirs:
            different += 1
            print(f"{script.stem} on {gpu}: Maya {ours}, CUDA PyTorch {theirs}")
    print(f"torch {installed().text}: {len(cases) - different} of {len(cases)} runs agree")
    if given.write:
        workload_figures.write(truth)
    raise SystemExit(different > 0)


if __name__ == "__main__":
    main()
