"""How long the simulator takes: a recorded FSDP2 step, over and over, up to two million events, with and without pricing.

python tests/benchmarks/bench_simulator.py [--plot docs/images/simulator.svg]
"""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import maya_core
from maya_core.hardware.cluster import cluster
from maya_core.predictor.pricing import durations_of
from maya_core.simulator.simulate import simulate
from maya_core.trace.job import JobTrace, collate
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama_fsdp2.py"
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000)


def recorded() -> RankTrace:
    """Rank 0 of eight, three steps of a small Llama."""
    arguments = ["--layers", "16", "--width", "1024", "--heads", "16", "--inner", "4096", "--context", "1024"]
    sys.argv = [str(EXAMPLE), *arguments]
    with maya_core.emulate("h100", gpus_per_node=8, nodes=1, steps=3) as job:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return job.trace


def repeated(trace: RankTrace, events: int) -> JobTrace:
    """The last step as often as it takes. Its CUDA events are recorded anew each time."""
    step = trace.step(trace.steps)
    times = -(-events // len(step))
    whole = np.tile(step, times)
    timed = np.isin(whole["kind"], (EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC))
    versions = 1 + int(
        step["a"][np.isin(step["kind"], (EventKind.EVENT_RECORD, EventKind.EVENT_WAIT, EventKind.EVENT_SYNC))].max()
    )
    whole["a"][timed] += versions * np.repeat(np.arange(times), len(step))[timed]
    return replace(collate([replace(trace, events=whole[:events])]), world_size=8, gpus_per_node=8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    trace = recorded()
    machine = cluster("h100", 8)
    begun = time.perf_counter()
    durations = {0: durations_of(trace, machine)}
    pricing = time.perf_counter() - begun
    simulate(repeated(trace, 1000), durations, machine)  # compiles the clock, once

    def timed(job: JobTrace) -> float:
        begun = time.process_time()
        simulate(job, durations, machine)
        return time.process_time() - begun

    seconds = []
    print(f"pricing {len(trace.calls)} distinct calls: {pricing:.2f} s\n")
    print(f"{'events':>10} {'seconds':>9} {'us each':>9}")
    for size in SIZES:
        job = repeated(trace, size)
        seconds.append(min(timed(job) for _ in range(3)))
        print(f"{size:10,} {seconds[-1]:9.3f} {1e6 * seconds[-1] / size:9.3f}")
    each = np.array(seconds) / np.array(SIZES)
    print(f"\nper event, {SIZES[-1]:,} against {SIZES[2]:,}: {each[-1] / each[2]:.2f} times as long (1 is linear)")
    if args.plot:
        plot(args.plot, seconds)


def plot(path: Path, seconds: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    axes.loglog(SIZES, seconds, "o-", label="simulate(), one core")
    axes.loglog(SIZES, [seconds[-1] * size / SIZES[-1] for size in SIZES], ":", color="grey", label="linear")
    axes.axhline(5, color="tab:red", linewidth=0.8)
    axes.text(SIZES[0], 5.4, "5 s", color="tab:red", fontsize=8)
    axes.set(xlabel="events in the trace", ylabel="seconds", title="Simulating a recorded FSDP2 step, over and over")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
