"""Compiled training scripts, emulated, beside what real CUDA PyTorch does: Triton kernels in order, products, launches and peak memory.

    python tests/accuracy/compile_against_oracle.py ORACLE [--only NAME] [--gpu h100] [--layers 2] [--write FIGURES.csv]

ORACLE is a command that runs a Python script on real CUDA PyTorch over a fake CUDA runtime and NCCL (docs/memory.md), as
`ORACLE script.py arguments`. With ORACLE_TRACE=file it writes what reached the runtime, a line each: L kernel, G matrix
product, P copy, Z memset; ORACLE_SM and ORACLE_SMS tell it the GPU, ORACLE_NDEV their number. It runs each script twice and the second
counts, whose compiled code comes from its cache: the first run times kernels on a device that takes no time.
Figures are those of the third step. Exits with 1 if kernels or products differ, or allocated memory by more than 1 %.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from distributed_against_oracle import launches as program_launches
from rich.console import Console
from rich.table import Table

from maya_core.hardware.catalog import find_gpu

HERE = Path(__file__).parent
SCRIPT = str(HERE.parent / "torch_compile/workloads/training.py")
NAMES = ("gpt2", "llama", "resnet", "ddp", "fsdp2", "adamw", "flex_attention", "dynamic")
MARK = "7919"
LIMIT = 1.0  # percent, of allocated memory


@dataclass(frozen=True)
class Launch:
    name: str
    grid: tuple[int, ...]
    threads: int
    configs: int = 1


@dataclass(frozen=True)
class Figures:
    triton: list[Launch]
    products: int
    launches: int
    allocated: int
    reserved: int


def environment(**more: str) -> dict[str, str]:
    """What torchrun would set for rank 0 of 8. Flash attention, as an oracle has no cuDNN to prefer."""
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}
    chosen = {"MASTER_PORT": "29556", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **job, **chosen, **more}


def peaks(output: str) -> dict[str, int]:
    return json.loads([line for line in output.splitlines() if line.startswith('{"step"')][-1])


def on_oracle(oracle: str, name: str, layers: str, gpu: str) -> Figures:
    found = find_gpu(gpu)
    major, minor = found.compute_capability
    with tempfile.NamedTemporaryFile("r") as trace:
        settings = {
            "ORACLE_TRACE": trace.name,
            "ORACLE_NDEV": "8",
            "ORACLE_SM": str(major * 10 + minor),
            "ORACLE_SMS": str(found.sms),
            # Here a run begins without what an earlier one learnt of its sizes (docs/compile.md).
            "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
        }
        for _ in ("cold", "warm"):
            command = [oracle, str(HERE / "alone.py"), SCRIPT, name, layers]
            done = subprocess.run(command, env=environment(**settings), capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed on the oracle:\n{done.stderr[-3000:]}")
        lines = Path(trace.name).read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if line == f"P,1,{MARK}")
    rows = [line.split(",") for line in lines[last + 1 :]]
    kernels = [row for row in rows if row[0] == "L"]
    triton = [Launch(row[1], tuple(map(int, row[2:5])), int(row[5])) for row in kernels if row[1].startswith("triton_")]
    products = sum(row[0] == "G" for row in rows)
    launches = program_launches(iter(lines[last + 1 :]))
    told = peaks(done.stdout)
    return Figures(triton, products, launches, told["allocated"], told["reserved"])


# A process of its own, as the figures are of one.
RUN = """
import json, runpy, sys, time
import maya_core
from maya_core.hardware.catalog import find_gpu
from maya_core.ops.plan import kernels_of
from maya_core.predictor.pricing import platform_of
from maya_core.trace.call import Tensor
gpu, *sys.argv = sys.argv[1:]
time.sleep = lambda seconds: None
with maya_core.emulate(gpu, gpus_per_node=8) as job:
    runpy.run_path(sys.argv[0], run_name="__main__")
calls = job.trace.calls
marks = [n for n, call in enumerate(calls) if any(isinstance(a, Tensor) and a.sizes == (7919,) and a.device == "cpu" for a in call.arguments)]
ops = job.trace.ops
last = max(i for i, op in enumerate(ops["subject"].tolist()) if op in marks)
step = [calls[n] for n in ops["subject"][last + 1:].tolist()]
triton = [
    dict(name=call.triton.name, grid=call.arguments[-3], threads=32 * call.triton.warps, configs=call.triton.configs)
    for call in step if call.triton
]
kernels = [kernel for call in step for kernel in kernels_of(call, platform_of(job.trace, find_gpu(gpu)))]
products = sum(kernel.family == "gemm" for kernel in kernels)
print("FIGURES", json.dumps(dict(triton=triton, products=products, launches=len(kernels))))
"""


def emulated(name: str, layers: str, gpu: str) -> Figures:
    command = [sys.executable, "-c", RUN, gpu, SCRIPT, name, layers]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed here:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout.split("FIGURES ")[1])
    triton = [Launch(**{**one, "grid": tuple(one["grid"])}) for one in told["triton"]]
    steps = peaks(done.stdout)
    return Figures(triton, told["products"], told["launches"], steps["allocated"], steps["reserved"])


def shape_differs(ours: Figures, theirs: Figures) -> int:
    """Kernels with one configuration whose grid or threads are others."""
    return sum(
        (a.grid, a.threads) != (b.grid, b.threads)
        for a, b in zip(ours.triton, theirs.triton, strict=True)
        if a.configs == 1
    )


def first_difference(ours: list[str], theirs: list[str]) -> str:
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"kernel {place}: {a} here, {b} there"
    return f"{len(ours)} here, {len(theirs)} there"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle")
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--layers", default="2")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    console = Console(width=150)
    table = Table(
        title=f"Compiled training, emulated against real CUDA PyTorch: {options.gpu}, {options.layers} layers"
    )
    for heading in (
        "script",
        "Triton kernels",
        "",
        "one config",
        "products",
        "launches",
        "",
        "allocated",
        "",
        "reserved",
        "",
    ):
        table.add_column(heading, justify="left" if heading == "script" else "right")
    rows, good = [], True
    for name in NAMES if options.only is None else (options.only,):
        theirs = on_oracle(options.oracle, name, options.layers, options.gpu)
        ours = emulated(name, options.layers, options.gpu)
        names, real = [one.name for one in ours.triton], [one.name for one in theirs.triton]
        same = names == real
        off = 100 * abs(ours.allocated / theirs.allocated - 1)
        good = good and same and ours.products == theirs.products and off <= LIMIT
        shapes = f"{shape_differs(ours, theirs)} differ" if same else ""
        cells = [name, f"{len(names)}", "same order" if same else first_difference(names, real), shapes]
        cells += [
            f"{ours.products} {ours.products - theirs.products:+}",
            f"{ours.launches:,}",
            f"{ours.launches - theirs.launches:+}",
        ]
        for mine, their in ((ours.allocated, theirs.allocated), (ours.reserved, theirs.reserved)):
            cells += [f"{mine:,}", f"{mine - their:+,}"]
        table.add_row(*cells)
        figures = asdict(theirs) | {"triton": " ".join(real)}
        rows.append({"script": name, "gpu": options.gpu, "layers": options.layers, **figures})
    console.print(table)
    if options.write:
        with options.write.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
