"""Times micro-benchmarks on a real GPU.

Each case is timed with CUDA events, with L2 flushed before every run: first on an idle GPU (burst), then for so long that power and
clocks have settled (sustained), as in training. Only the event timer needs a GPU; the loop works with any timer.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from maya_core.calibrate.cases import CalibrationCase, OpCall, kernel_of
from maya_core.device import build
from maya_core.errors import MayaError
from maya_core.hardware.catalog import Gpu
from maya_core.ops.kernel import Kernel
from maya_core.predictor.calibration import Measured

BURST_RUNS = 10
LEAST_RUNS = 20
KEPT = 0.5  # the last half of a long run counts as sustained
SHORTEST_S = 5e-6  # shorter times are dominated by the events themselves
ROOM = 0.8  # the share of the GPU's memory that a case may use


@dataclass(frozen=True)
class Timing:
    """The duration of one call, in seconds."""

    burst: float
    sustained: float
    spread: float  # interquartile range divided by the median, of the sustained runs
    samples: int


class Timer(Protocol):
    def time(self, call: Callable[[], Any], kernel: Kernel) -> Timing: ...


@dataclass
class MeasuredCase:
    measured: list[Measured] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    slowdown: float | None = None  # sustained divided by burst time, the median over products and attention


def run(
    every: Iterable[CalibrationCase],
    gpu: Gpu,
    timer: Timer,
    *,
    memory_bytes: float | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> MeasuredCase:
    """Times every case. Cases that this GPU or torch does not support are counted and skipped."""
    room = ROOM * (memory_bytes if memory_bytes is not None else gpu.memory_bytes)
    rows: dict[Kernel, Measured] = {}
    outcome = MeasuredCase()
    for case in every:
        progress(case.name)
        if case.nbytes > room:
            outcome.skipped["do not fit into memory"] += 1
            continue
        try:
            call = case.make()
            assert isinstance(call, OpCall)
            kernel = kernel_of(gpu, call, call())
        except (RuntimeError, NotImplementedError):  # a backend that this GPU does not support
            outcome.skipped["are not supported by this GPU or torch"] += 1
            continue
        if kernel is None:
            outcome.skipped["launch more than one kernel"] += 1
            continue
        timing = timer.time(call, kernel)
        if timing.sustained < SHORTEST_S:
            outcome.skipped["are too short for events"] += 1
            continue
        rows[kernel] = Measured(
            family=kernel.family,
            model=kernel.model,
            sizes=kernel.sizes,
            seconds=timing.sustained,
            samples=timing.samples,
            spread=round(timing.spread, 4),
            burst_seconds=timing.burst,
        )
    outcome.measured = list(rows.values())
    bound_by_power = [row for row in outcome.measured if row.family in ("gemm", "attention") and row.burst_seconds]
    loaded = [row.seconds / (row.burst_seconds or row.seconds) for row in bound_by_power]
    outcome.slowdown = statistics.median(loaded) if loaded else None
    return outcome


def sample(once: Callable[[int], list[float]], seconds: float, clock: Callable[[], float] = time.monotonic) -> Timing:
    """Makes a timing from `once(n)`, which runs a call n times in a row and returns the seconds of each run."""
    once(3)  # in the first run, cuBLAS and cuDNN choose their kernels
    burst = statistics.median(once(BURST_RUNS))
    each, found, start = LEAST_RUNS, list[float](), clock()
    while len(found) < LEAST_RUNS or clock() - start < seconds:
        found += once(each)
        each = min(
            max(LEAST_RUNS, round(0.1 / max(burst, 1e-6))), 1000
        )  # a tenth of a second between two readings of the clock
    settled = np.array(found[round(len(found) * (1 - KEPT)) :])
    low, middle, high = np.percentile(settled, [25, 50, 75])
    return Timing(burst, float(middle), float((high - low) / middle), len(settled))


class EventTimer:
    """Times calls on the current CUDA device."""

    def __init__(self, l2_bytes: int, *, sustain_s: float = 1.0, rest_s: float = 0.05) -> None:
        self.sustain_s, self.rest_s = sustain_s, rest_s
        self.flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
        self.overhead = 0.0
        self.overhead = statistics.median(self._runs(lambda: None, 50))

    def time(self, call: Callable[[], Any], kernel: Kernel) -> Timing:
        torch.cuda.synchronize()
        time.sleep(self.rest_s)
        return sample(lambda count: self._runs(call, count), self.sustain_s)

    def _runs(self, call: Callable[[], Any], count: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        for start, end in pairs:
            self.flush.zero_()  # clears L2, and lets the host get ahead of the GPU
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [max(start.elapsed_time(end) * 1e-3 - self.overhead, 1e-9) for start, end in pairs]


def is_emulated() -> bool:
    """Whether the CUDA device of this process is emulated."""
    return build._native is not None and bool(build._native.installed())


def require_gpu() -> str:
    """The driver's name of the GPU to measure. Raises an error if there is none."""
    if is_emulated():
        raise MayaError(
            "the GPU of this process is emulated, so its times are Maya's own predictions and cannot be measured.",
            "Run `maya calibrate measure` by itself, on a machine with the GPU.",
        )
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " This torch is a CPU build; a CUDA build is needed as well."
        raise MayaError(
            f"this machine has no CUDA GPU.{built}",
            "Run this on a machine with the GPU and copy the file it writes, or calibrate from what you have: "
            "`maya calibrate kineto TRACE.json` reads a profiler trace, `maya calibrate nccl OUTPUT.txt` nccl-tests.",
        )
    return torch.cuda.get_device_name()
