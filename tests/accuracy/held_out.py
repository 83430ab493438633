"""The error of predicted durations on measurements that the fit did not see: python tests/accuracy/held_out.py DATA

Every family is fitted again without a part of its rows (shapes, models, whole clusters, the largest tenth), and
predicts that part. Beside it, on the same rows: a plain roofline of the data sheet, and torch's own estimator (RuntimeEstimator,
"operator-level-cost-model"). DATA is a folder of measurements; docs/predictor.md says which files it holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.predictor.fitting.fitted import FAMILIES
from maya_core.predictor.fitting.splits import Line, errors
from maya_core.predictor.gemm_time import peak_flops

HALF_GPUS = ("a100", "h100", "b200")


@dataclass(frozen=True)
class Goal:
    """A row of the table: which lines it takes, and what they are to stay below."""

    label: str
    takes: Callable[[Line], bool]
    median: float | None = None
    p90: float | None = None


def _of(family: str, *splits: str, models: tuple[str, ...] = (), gpus: tuple[str, ...] = ()) -> Callable[[Line], bool]:
    def takes(line: Line) -> bool:
        return (
            line.family == family
            and any(line.split.startswith(split) for split in splits)
            and (not models or line.model in models)
            and (not gpus or line.gpu in gpus)
        )

    return takes


GOALS = [
    Goal("GEMM bf16, A100 H100 B200, unseen (n, k)", _of("gemm", "unseen (n, k)", models=("bfloat16",), gpus=HALF_GPUS), 3, 8),
    Goal("GEMM under sustained load, unseen models", _of("gemm", "unseen models", models=("bfloat16",)), 6, 15),
    Goal("GEMM and bmm fp32, unseen shapes or models", _of("gemm", "unseen shapes", "unseen models", models=("float32",)), 8, 25),
    Goal("GEMM fp8, unseen (n, k)", _of("gemm", "unseen (n, k)", models=("float8",))),
    Goal("attention forward, A100 H100 B200, unseen heads", _of("attention", "unseen head shapes", models=("fused", "flash2"), gpus=HALF_GPUS), 3, 10),
    Goal("attention forward, FlashAttention-3, unseen heads", _of("attention", "unseen head shapes", models=("flash3",))),
    Goal("attention forward + backward, unseen lengths", _of("attention", "forward + backward"), 10, 20),
    Goal("memory-bound >= 1 MB, unseen shapes", _of("memory", "unseen shapes"), 8, 25),
    Goal("memory-bound >= 1 MB, unseen ops", _of("memory", "unseen: ")),
    Goal("convolution, unseen shapes", _of("convolution", "unseen shapes")),
    Goal("recurrent, unseen shapes", _of("recurrent", "unseen shapes")),
    Goal("GEMM bf16, fp8, largest tenth held out", _of("gemm", "largest tenth", models=("bfloat16", "float8", "float16")), 10, 30),
    Goal("GEMM fp32, largest tenth held out", _of("gemm", "largest tenth", models=("float32",)), 10, 30),
    Goal("attention, largest tenth held out", _of("attention", "largest tenth"), 10, 30),
    Goal("memory-bound, largest tenth held out", _of("memory", "largest tenth"), 10, 30),
    Goal("convolution, largest tenth held out", _of("convolution", "largest tenth"), 10, 30),
    Goal("recurrent, largest tenth held out", _of("recurrent", "largest tenth"), 10, 30),
    Goal("collectives >= 1 MB, within a node", _of("collectives", "intra-node >= 1 MB"), 6, 18),
    Goal("collectives >= 1 MB, between nodes", _of("collectives", "inter-node >= 1 MB"), 15, 35),
    Goal("collectives < 1 MB", _of("collectives", "intra-node < 1 MB", "inter-node < 1 MB"), 10, 25),
    Goal("collectives of a Slingshot cluster nobody measured", _of("collectives", "inter-node (Slingshot)"), 15, 35),
    Goal("collectives, largest tenth held out", _of("collectives", "intra-node, largest", "inter-node, largest"), 10, 30),
]  # fmt: skip


def torch_estimate(line: Line) -> np.ndarray | None:
    """RuntimeEstimator's roofline: half the FLOPs over 75 % of what torch takes for the peak, or bytes over bandwidth.

    torch.utils._runtime_estimation of torch 2.13, with torch's own device table where it has the GPU.
    """
    if line.moved is None:
        return None
    import torch
    from torch._inductor.analysis.device_info import lookup_device_info

    dtypes = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8": torch.float8_e5m2,
        "float32": torch.float32,
    }
    gpu = find_gpu(line.gpu)
    dtype = line.model if line.model in dtypes else "bfloat16"
    known = lookup_device_info(gpu.driver_name)
    peak = known.tops.get(dtypes[dtype]) if known else None
    rate = peak * 1e12 if peak else peak_flops(gpu, dtype)
    bandwidth = known.dram_bw_gbs * 1e9 if known else gpu.memory_bandwidth_bytes_per_s
    transfer = line.moved / bandwidth
    return transfer if line.flops is None else np.maximum(line.flops / 2 / (0.75 * rate), transfer)


def _share(measured: np.ndarray, predicted: np.ndarray) -> str:
    off = errors(measured, predicted)
    return f"{np.median(off):.1f} / {np.percentile(off, 90):.0f}"


def _together(lines: list[Line]) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    measured, predicted, roofline = (
        np.concatenate([getattr(line, side) for line in lines]) for side in ("measured", "predicted", "roofline")
    )
    estimated = [(line.measured, torch_estimate(line)) for line in lines if line.moved is not None]
    torch_side = None
    if estimated:
        torch_side = (
            np.concatenate([m for m, _ in estimated]),
            np.concatenate([e for _, e in estimated if e is not None]),
        )
    return measured, predicted, roofline, torch_side


def rows_of(lines: list[Line], goals: list[Goal], *, by_gpu: bool) -> list[list[str]]:
    """Label, rows, ours, goal, whether reached, roofline, torch: median and 90th percentile of errors in percent."""
    found = []
    for goal in goals:
        taken = [line for line in lines if goal.takes(line)]
        if not taken:
            continue
        groups = [(goal.label, taken)]
        if by_gpu:
            names = dict.fromkeys((line.gpu, line.model) for line in taken)
            groups += [(f"    {gpu} {model}", [line for line in taken if (line.gpu, line.model) == (gpu, model)]) for gpu, model in names]  # fmt: skip
        for label, part in groups:
            measured, predicted, roofline, torch_side = _together(part)
            off = errors(measured, predicted)
            median, p90 = np.median(off), np.percentile(off, 90)
            wanted, reached = "", ""
            if goal.median is not None and goal.p90 is not None:
                wanted = f"{goal.median:g} / {goal.p90:g}"
                reached = "yes" if median <= goal.median and p90 <= goal.p90 else "no"
            found.append([
                label, f"{len(off):,}", f"{median:.1f} / {p90:.1f}", wanted, reached, _share(measured, roofline),
                _share(*torch_side) if torch_side else "",
            ])  # fmt: skip
    return found


HEADINGS = ["held out", "rows", "Maya %", "goal %", "reached", "roofline %", "torch %"]


def main(
    data: Annotated[Path, typer.Argument(help="Folder with the measurements.")],
    family: Annotated[list[str] | None, typer.Option(help="Only these families.")] = None,
    by_gpu: Annotated[bool, typer.Option(help="A row for each GPU and kernel, too.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file as well.")] = None,
) -> None:
    """Fits without a part of the rows and prints how far off the fits are on that part."""
    console, lines = Console(), list[Line]()
    begun = time.monotonic()
    with console.status("reading") as status:
        for name, fit in FAMILIES.items():
            if family and name not in family:
                continue
            for profile, found in fit(data):
                lines += found
                status.update(f"{name}: after {profile.gpu}, {time.monotonic() - begun:.0f} s")
    table = Table(*HEADINGS, title="Error on rows the fit did not see: median / 90th percentile")
    rows = rows_of(lines, GOALS, by_gpu=by_gpu)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if markdown is not None:
        text = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
        text += ["| " + " | ".join(cell.replace("    ", "&nbsp;&nbsp;") for cell in row) + " |" for row in rows]
        markdown.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    try:
        typer.run(main)
    except MayaError as error:
        print(error.problem, error.advice, file=sys.stderr)
        raise SystemExit(2) from None
