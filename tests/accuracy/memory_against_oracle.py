"""Memory and launches of training scripts on the emulated device, beside what real CUDA PyTorch did.

    python tests/accuracy/memory_against_oracle.py FIGURES.csv WORKLOADS/

FIGURES.csv has a row per GPU and script: gpu (a name of the catalog, or one that starts with it), name (of the script),
max_memory_allocated, max_memory_reserved and, for launches, one or more of launches, gemms, memsets, memcpys, which are
added up. The scripts print one JSON line with the peaks, as `torch.cuda` gives them. Exits with 1 if allocated memory is
off by more than 0.5 %, reserved by more than 3 %, or launches by more than 2 %.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from maya_core.hardware.catalog import find_gpu
from maya_core.trace import read_trace

sys.path.insert(0, str(Path(__file__).parents[1]))
from launches import launches

LIMITS = {"allocated": 0.5, "reserved": 3.0, "launches": 2.0}  # percent


def gpu_of(label: str) -> str:
    name = label.lower()
    return find_gpu(name if "40gb" in name else name.split("-")[0]).name


def emulated(script: Path, gpu: str) -> dict[str, int]:
    """Runs the script whole under `maya run`; its own JSON line has the memory, the trace has the launches."""
    # the figures were taken with flash attention, which this variable makes torch prefer on every GPU
    environment = {**os.environ, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        maya = Path(sys.executable).parent / "maya"
        command = [
            str(maya),
            "run",
            "--gpu",
            gpu,
            "--steps",
            "all",
            "--out",
            f"{folder}/out",
            "--",
            sys.executable,
            str(script.resolve()),
        ]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{script.name} failed on {gpu}:\n{done.stderr[-3000:]}")
        line = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
        trace = read_trace(next(Path(folder, "out", "latest").glob("*.trace")))
    return {
        "allocated": line["max_memory_allocated"],
        "reserved": line["max_memory_reserved"],
        "launches": launches(trace),
    }


def expected(row: dict[str, str]) -> dict[str, int]:
    launches = sum(int(row[name]) for name in ("launches", "gemms", "memsets", "memcpys") if row.get(name))
    return {
        "allocated": int(row["max_memory_allocated"]),
        "reserved": int(row["max_memory_reserved"]),
        "launches": launches,
    }


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    figures, workloads = Path(sys.argv[1]), Path(sys.argv[2])
    table = Table(title="Emulated against real CUDA PyTorch")
    for heading in ("GPU", "script", "allocated", "", "reserved", "", "launches", ""):
        table.add_column(heading, justify="left" if heading in ("GPU", "script") else "right")
    worst, identical = dict.fromkeys(LIMITS, 0.0), 0
    rows = list(csv.DictReader(figures.open()))
    for row in track(rows, "Emulating", console=Console(stderr=True)):
        gpu = gpu_of(row["gpu"])
        ours, theirs = emulated(workloads / f"{row['name']}.py", gpu), expected(row)
        identical += ours == theirs
        cells = [gpu, row["name"]]
        for what in LIMITS:
            off = 100 * (ours[what] - theirs[what]) / theirs[what]
            worst[what] = max(worst[what], abs(off))
            cells += [f"{ours[what]:,}", f"{off:+.3f} %"]
        table.add_row(*cells)
    console = Console(width=140)
    console.print(table)
    console.print(f"{identical} of {len(rows)} runs are identical.")
    console.print("Worst: " + ", ".join(f"{what} {off:.3f} % (limit {LIMITS[what]} %)" for what, off in worst.items()))
    raise SystemExit(any(worst[what] > LIMITS[what] for what in LIMITS))


if __name__ == "__main__":
    main()
