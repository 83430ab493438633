"""Golden predictions: the predictions of small programs on five GPUs are stored, so that no change of them goes unnoticed.

python tests/golden/golden.py record [PROGRAM ...] emulates the programs anew and prices them; python tests/golden/golden.py price only
prices the traces that are kept. Both write figures.json, whose diff says what a change of the code does to predictions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.pipeline import analyse
from maya_core.report.analysis import Analysis
from maya_core.report.summary import summarize
from maya_core.trace.job import JobTrace, read_job
from maya_core.trace.rank import read_trace, write_trace
from maya_core.trace.schema import EventKind

HERE = Path(__file__).resolve().parent
PROGRAMS, TRACES, FIGURES = HERE / "programs", HERE / "traces", HERE / "figures.json"
GPUS = ("v100", "a100", "h100", "b200", "l40s")
# Programs by how many GPUs they use.
WORLDS = {
    "encoder_float32": 1,
    "flex_attention": 1,
    "gpt2_ddp": 8,
    "llama_compiled": 1,
    "llama_fsdp2": 8,
    "lora": 1,
    "lstm": 1,
    "megatron_tp_pp": 4,
    "moe": 1,
    "pipeline": 4,
    "resnet_amp": 1,
    "resnet_float32": 1,
    "sorting_and_indexing": 1,
    "unet_groupnorm": 1,
    "zero3": 4,
}
STEPS = 3
DIGITS = 6
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date a zip can hold


def recorded() -> dict[str, list[str]]:
    """The GPUs that each program was recorded on."""
    found = {program: [gpu for gpu in GPUS if (TRACES / program / gpu).is_dir()] for program in sorted(WORLDS)}
    return {program: gpus for program, gpus in found.items() if gpus}


def read(program: str, gpu: str) -> JobTrace:
    return read_job(TRACES / program / gpu)


# Recording.


def record(program: str, gpu: str) -> str:
    """Emulates the program and keeps what it left. Returns what went wrong, if anything did."""
    kept = TRACES / program / gpu
    shutil.rmtree(kept, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out" / "latest"
        done = subprocess.run(
            _command(program, gpu, out), cwd=PROGRAMS, env=_environment(Path(folder)), capture_output=True, text=True
        )
        if done.returncode != 0 or not (out / "job.json").exists():
            return (done.stderr.strip() or done.stdout.strip())[-2000:]
        kept.mkdir(parents=True)
        for path in sorted([*out.glob("rank-*.trace"), out / "job.json"]):
            shutil.copyfile(path, kept / path.name)
    for path in kept.glob("rank-*.trace"):
        settle(path)
    manifest = kept / "job.json"
    manifest.write_text(_without_places(manifest.read_text()))
    return ""


def _command(program: str, gpu: str, out: Path) -> list[str]:
    world = WORLDS[program]
    start = ["torchrun", "--nproc-per-node", str(world)] if world > 1 else ["python"]
    maya = str(Path(sys.executable).parent / "maya")
    return [maya, "run", "--gpu", gpu, "--steps", str(STEPS), "--out", str(out.parent), "--", *start, f"{program}.py"]


def _environment(folder: Path) -> dict[str, str]:
    """Of a user who has neither hardware nor calibrations of their own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if name not in ("MAYA_HARDWARE", "MAYA_PROFILES")}
    return {**own, "PATH": path, "XDG_CONFIG_HOME": str(folder / "config")}


def settle(path: Path) -> None:
    """Rewrites a trace so that recording the program again, anywhere, gives the same bytes."""
    trace = read_trace(path)
    events = _in_one_order(trace.events)
    events["time_ns"] = 0
    meta = dict(trace.meta)
    if meta["compiled"]:
        meta["compiled"] = {**meta["compiled"], "seconds": 0.0}  # of this machine's
    write_trace(path, replace(trace, events=events, meta=meta))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(members.items()):
            text = _without_places(content.decode()).encode() if name.endswith(".json") else content
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED, 9)


def _in_one_order(events: np.ndarray) -> np.ndarray:
    """Blocks that are freed at once, one after the other, by address: torch may let go of them in any order."""
    free = events["kind"] == EventKind.FREE
    run = np.cumsum(np.diff(free.astype(np.int8), prepend=0) != 0)
    key = np.where(free, events["a"], np.arange(len(events)))
    return events[np.lexsort((key, run))]


def _without_places(text: str) -> str:
    """Paths as they are on every machine: of the program its name, of packages and Python's library what comes after their folders."""
    for folder in (PROGRAMS, Path(sys.executable).parent, HERE.parents[1]):
        text = text.replace(f"{folder}/", "")
    return re.sub(r'(?<=["(\s])/[^"\s]*?/(site-packages|lib/python3\.\d+(?!/site-packages))/', "", text)


# Pricing.


def figures_of(job: JobTrace) -> dict[str, Any]:
    """What the job is predicted to do on the GPUs it was recorded for."""
    analysis = analyse(job)
    prediction = summarize(analysis)
    assert prediction.step_time_s is not None
    kernels, collectives = step_of(analysis)
    return {
        "step_time_s": _rounded(prediction.step_time_s),
        "launches_per_step": prediction.trace.kernels_per_step,
        "kernels_s": {name: _rounded(seconds) for name, seconds in kernels.items()},
        "collectives_s": {name: _rounded(seconds) for name, seconds in collectives.items()},
        "memory_bytes": {
            f"rank {row.rank}": {"allocated": row.peak_allocated_bytes, "reserved": row.peak_reserved_bytes}
            for row in prediction.memory.ranks
        },
    }


def step_of(analysis: Analysis) -> tuple[Counter[str], Counter[str]]:
    """Seconds of the last step of the first emulated rank: of kernels by family and model, and of collectives.

    All that is taken from the inside of the predictor is taken here.
    """
    rank = min(analysis.job.ranks)
    trace, priced = analysis.job.ranks[rank], analysis.durations[rank]
    step = trace.step(trace.steps)
    first = np.cumsum(priced.launches) - priced.launches  # of each call's kernels among all
    kernels: Counter[str] = Counter()
    for number in step["subject"][step["kind"] == EventKind.OP].tolist():
        for place, kernel in enumerate(priced.kernels[number]):
            kernels[f"{kernel.family} {kernel.model}".strip()] += priced.each.seconds[first[number] + place]
    collectives: Counter[str] = Counter()
    for number in step["subject"][step["kind"] == EventKind.COLLECTIVE].tolist():
        collectives[trace.collectives[number].op] += priced.collectives.seconds[number]
    return kernels, collectives


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def price() -> None:
    """Writes the figures of all traces that are kept."""
    found = {program: {gpu: figures_of(read(program, gpu)) for gpu in gpus} for program, gpus in recorded().items()}
    FIGURES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def stored() -> dict[str, Any]:
    return json.loads(FIGURES.read_text())


def main(arguments: list[str]) -> int:
    known = sorted(WORLDS)
    match arguments:
        case ["price"]:
            price()
            return 0
        case ["record", *programs] if set(programs) <= set(known):
            failed = [pair for program in programs or known for pair in _record_all(program)]
            price()
            print(f"failed: {', '.join(failed)}" if failed else f"wrote {FIGURES}")
            return 1 if failed else 0
    print(f"usage: golden.py record [PROGRAM ...] | price\nprograms: {', '.join(known)}", file=sys.stderr)
    return 2


def _record_all(program: str) -> list[str]:
    """The program on every GPU. Returns the pairs that failed."""
    failed = []
    for gpu in GPUS:
        began = time.perf_counter()
        wrong = record(program, gpu)
        size = sum(path.stat().st_size for path in (TRACES / program / gpu).glob("*"))
        print(f"{program:22} {gpu:6} {time.perf_counter() - began:5.1f} s {size / 1024:6.1f} KiB", flush=True)
        if wrong:
            failed.append(f"{program} on {gpu}")
            print(wrong, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
