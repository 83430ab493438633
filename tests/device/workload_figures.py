"""Peaks and launches of small training runs, per version of torch: data/oracle.csv has those of CUDA torch over a fake runtime."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from maya_core.torch_seam.version import installed, text

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE / "workloads").glob("*.py"))
GPUS = ("a100", "h100")
RECORDED = HERE / "data/oracle.csv"
COLUMNS = ("torch", "name", "gpu", "allocated", "reserved", "launches")


class Figures(NamedTuple):
    allocated: int
    reserved: int
    launches: int


# Runs in its own process, as the figures were measured: peaks depend on everything that the process allocated before.
RUN = """
import json, os, runpy, sys
script, gpu, tests = sys.argv[1:]
sys.path.insert(0, tests)
import torch
from ops.oracle_figures import kernels_called
from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu
launches = len(kernels_called(EmulatedDevice(find_gpu(gpu), 1), lambda: runpy.run_path(script)))
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), launches]), flush=True)
os._exit(0)  # a thread of autograd may still be releasing the last backward, and torch aborts if Python ends meanwhile
"""


def emulated(script: Path, gpu: str) -> Figures:
    environment = {**os.environ, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}  # the figures are of flash attention
    command = [sys.executable, "-c", RUN, str(script), gpu, str(HERE.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Figures(*json.loads(done.stdout.splitlines()[-1]))


def _rows() -> list[dict[str, str]]:
    with RECORDED.open() as file:
        return list(csv.DictReader(file))


def recorded() -> dict[tuple[str, str], Figures]:
    """What CUDA torch of the installed version has, by script and GPU."""
    return {
        (row["name"], row["gpu"]): Figures(int(row["allocated"]), int(row["reserved"]), int(row["launches"]))
        for row in _rows()
        if row["torch"] == text(installed().version)
    }


def write(figures: Mapping[tuple[str, str], Figures]) -> None:
    """Keeps the figures of the installed version, beside those of the others."""
    version = text(installed().version)
    rows = [row for row in _rows() if row["torch"] != version]
    rows += [
        {"torch": version, "name": name, "gpu": gpu, **{column: str(value) for column, value in each._asdict().items()}}
        for (name, gpu), each in figures.items()
    ]
    with RECORDED.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["torch"], row["name"], row["gpu"])))
