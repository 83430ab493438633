"""Predicts a Llama eager and compiled: how much shorter a step is, and why.

    python tests/accuracy/compiled_against_eager.py [--gpus a100,h100] [--layers 16] [--batch 2] [--length 4096]

The model is that of examples/train_llama_fsdp2.py in the sizes of Llama 3.2 1B; bfloat16, fused AdamW, one GPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import maya_core
from maya_core.hardware.catalog import find_gpu
from maya_core.ops.plan import kernels_of
from maya_core.predictor.pricing import platform_of
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_llama_fsdp2 import Llama

MOVES = ("memory", "triton", "copy")


@dataclass(frozen=True)
class Step:
    seconds: float
    launches: int
    gigabytes: float  # moved by kernels that do nothing else
    families: dict[str, float]  # seconds
    host_s: float
    peak_bytes: int


def train(layers: int, batch: int, length: int, compiled: bool) -> None:
    sizes = argparse.Namespace(
        width=2048, heads=32, kv_heads=8, inner=8192, layers=layers, vocabulary=128256, recompute=False
    )
    with torch.device("cuda"):
        model = Llama(sizes).to(torch.bfloat16)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    step = torch.compile(loss) if compiled else loss
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 128256, (batch, length)).cuda()
    for _ in range(3):
        step(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def moved(trace: RankTrace) -> float:
    step = trace.step(trace.steps)
    called = [trace.calls[number] for number in step["subject"][step["kind"] == EventKind.OP]]
    platform = platform_of(trace, find_gpu(trace.meta["gpu"]))
    kernels = [kernel for call in called for kernel in kernels_of(call, platform) if kernel.family in MOVES]
    return sum(sum(kernel.sizes[: 1 if kernel.family == "copy" else 2]) for kernel in kernels) / 1e9


def emulated(gpu: str, compiled: bool, options: argparse.Namespace) -> Step:
    with maya_core.emulate(gpu, steps=3) as job:
        train(options.layers, options.batch, options.length, compiled)
    prediction = job.prediction
    assert prediction.step_time_s and prediction.time and prediction.trace.kernels_per_step
    families = dict(prediction.time.by_family_s)
    families["memory"] = sum(families.pop(name, 0.0) for name in MOVES)
    peak = prediction.memory.ranks[0].peak_allocated_bytes
    launches = prediction.trace.kernels_per_step
    return Step(prediction.step_time_s, launches, moved(job.trace), families, prediction.time.host_s, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="a100,h100")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    table = Table(title=f"Llama, {options.layers} layers, {options.batch} x {options.length} tokens")
    headings = (
        "GPU",
        "",
        "step ms",
        "launches",
        "GB moved",
        "memory-bound ms",
        "products ms",
        "attention ms",
        "host ms",
        "peak GiB",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("GPU", "") else "right")
    for gpu in options.gpus.split(","):
        eager, compiled = (emulated(gpu, choice, options) for choice in (False, True))
        for name, one in (("eager", eager), ("compiled", compiled)):
            milliseconds = [1e3 * one.families.get(family, 0.0) for family in ("memory", "gemm", "attention")]
            cells = [
                f"{1e3 * one.seconds:,.1f}",
                f"{one.launches:,}",
                f"{one.gigabytes:,.1f}",
                *(f"{each:,.1f}" for each in milliseconds),
            ]
            table.add_row(gpu, name, *cells, f"{1e3 * one.host_s:,.1f}", f"{one.peak_bytes / 2**30:,.1f}")
        saved = [eager.seconds - compiled.seconds, eager.families["memory"] - compiled.families["memory"]]
        fewer = eager.launches - compiled.launches
        table.add_row(
            gpu,
            "saved",
            f"{1e3 * saved[0]:,.1f}",
            f"{fewer:,}",
            f"{eager.gigabytes - compiled.gigabytes:,.1f}",
            f"{1e3 * saved[1]:,.1f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
