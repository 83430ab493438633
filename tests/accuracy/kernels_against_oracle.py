"""Which kernels ops launch, as the predictor has it, beside what real CUDA PyTorch launched.

    python tests/accuracy/kernels_against_oracle.py RUN [--write FIGURES.csv]

RUN is a command that runs a script on real CUDA PyTorch over a fake CUDA runtime, and writes what was launched into the
file ORACLE_TRACE names: `L kernel,grid,block,...`, `G gemm,m,n,k,batch`, `P direction,bytes`, `Z bytes` and
`S cudaDeviceSynchronize`. With --write the figures are kept, for tests/ops/test_op_kernels.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from ops.op_cases import CASES
for make in CASES.values():
    call = make()
    torch.cuda.synchronize()
    call()
    torch.cuda.synchronize()
"""


def launched(run: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        script, trace = Path(folder, "cases.py"), Path(folder, "trace.txt")
        script.write_text(SCRIPT)
        subprocess.run(
            [run, str(script)], env={**os.environ, "ORACLE_TRACE": str(trace)}, check=True, capture_output=True
        )
        return trace.read_text().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    from ops import oracle_figures
    from ops.op_cases import CASES

    from maya_core.device.emulated import EmulatedDevice
    from maya_core.hardware.catalog import find_gpu

    figures = oracle_figures.parse(launched(given.run), list(CASES))
    if given.write:
        oracle_figures.write(given.write, figures)
    by_case: dict[str, list[oracle_figures.Figure]] = {name: [] for name in CASES}
    for figure in figures:
        by_case[figure.case].append(figure)
    device = EmulatedDevice(find_gpu("h100"), 1)
    wrong = 0
    for name, expected in by_case.items():
        if trouble := oracle_figures.disagreement(expected, oracle_figures.emulated_kernels(device, name)):
            wrong += 1
            print(f"{name}: {trouble}")
    device.remove()
    print(f"{len(by_case) - wrong} of {len(by_case)} ops agree ({len(figures)} launches)")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
