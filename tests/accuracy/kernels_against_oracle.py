"""Which kernels ops launch and what they allocate, as Maya plans it, beside what real CUDA PyTorch did.

    python tests/accuracy/kernels_against_oracle.py RUN [--write]

RUN is a command that runs a script on real CUDA PyTorch, of the same version as here, over a fake CUDA runtime, and writes what was
launched into the file ORACLE_TRACE names: `L kernel,grid,block,...`, `G gemm,m,n,k,batch`, `P direction,bytes`, `Z bytes` and
`S cudaDeviceSynchronize`. With --write the figures are kept in tests/ops/oracle, for tests/ops/test_op_kernels.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from cuda_runs import check_version, on_cuda

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from ops.op_cases import CASES, make_workspaces, peak_bytes
make_workspaces()
peaks = {{}}
for name, make in CASES.items():
    call = make()
    torch.cuda.synchronize()
    peaks[name] = peak_bytes(call)
    torch.cuda.synchronize()
print(json.dumps(peaks))
"""


def launched(run: str) -> tuple[list[str], dict[str, int]]:
    """The lines of the trace, and the peaks of the cases."""
    with tempfile.TemporaryDirectory() as folder:
        script, trace = Path(folder, "cases.py"), Path(folder, "trace.txt")
        script.write_text(SCRIPT)
        done = on_cuda(run, script, ORACLE_TRACE=str(trace))
        return trace.read_text().splitlines(), json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    from ops import oracle_figures

    from maya_core.device.emulated import EmulatedDevice
    from maya_core.hardware.catalog import find_gpu
    from maya_core.torch_seam.version import COMPARED, installed

    check_version(given.run)
    torch = installed().version
    by_case = oracle_figures.parse(*launched(given.run))
    if given.write:
        known = {} if torch == COMPARED else oracle_figures.figures_of(COMPARED)
        new = {case: figures for case, figures in by_case.items() if known.get(case) != figures}
        oracle_figures.write(oracle_figures.path_of(torch), new)
    device = EmulatedDevice(find_gpu("h100"), 1)
    wrong = 0
    for name, expected in by_case.items():
        if trouble := oracle_figures.disagreement(expected, *oracle_figures.emulated(device, name)):
            wrong += 1
            print(f"{name}: {trouble}")
    device.remove()
    print(f"{len(by_case) - wrong} of {len(by_case)} ops agree ({sum(map(len, by_case.values()))} figures)")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
