"""Times micro-benchmarks on a GPU that is there.

Each case is timed with CUDA events, L2 flushed before every run, first on a GPU that was idle (burst) and then for so long
that power and clocks have settled (sustained): training runs at the second. Only the event timer needs a GPU; the loop asks
whatever timer it is given.
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
SHORTEST_S = 5e-6  # below that, events say more of themselves than of the kernel
ROOM = 0.8  # of the GPU's memory that a case may take


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    burst: float
    sustained: float
    spread: float  # interquartile range by the median, of the sustained runs
    samples: int


class Timer(Protocol):
    def time(self, call: Callable[[], Any], kernel: Kernel) -> Timing: ...


@dataclass
class MeasuredCase:
    measured: list[Measured] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    slowdown: float | None = None  # sustained by burst, the median over products and attention


def run(
    every: Iterable[CalibrationCase],
    gpu: Gpu,
    timer: Timer,
    *,
    memory_bytes: float | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> MeasuredCase:
    """Times every case. What this GPU or torch cannot do is counted and left out."""
    room = ROOM * (memory_bytes if memory_bytes is not None else gpu.memory_bytes)
    rows: dict[Kernel, Measured] = {}
    outcome = MeasuredCase()
    for case in every:
        progress(case.name)
        if case.nbytes > room:
            outcome.skipped["do not fit"] += 1
            continue
        try:
            call = case.make()
            assert isinstance(call, OpCall)
            kernel = kernel_of(gpu, call, call())
        except (RuntimeError, NotImplementedError):  # a backend that this GPU does not have
            outcome.skipped["not offered by this GPU or torch"] += 1
            continue
        if kernel is None:
            outcome.skipped["more than one kernel"] += 1
            continue
        timing = timer.time(call, kernel)
        if timing.sustained < SHORTEST_S:
            outcome.skipped["too short for events"] += 1
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
    """A timing out of `once(n)`, which runs a call n times on end and gives each run's seconds."""
    once(3)  # cuBLAS and cuDNN choose their kernels at the first
    burst = statistics.median(once(BURST_RUNS))
    each, found, start = LEAST_RUNS, list[float](), clock()
    while len(found) < LEAST_RUNS or clock() - start < seconds:
        found += once(each)
        each = min(max(LEAST_RUNS, round(0.1 / max(burst, 1e-6))), 1000)  # a tenth of a second before the next look
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
            self.flush.zero_()  # nothing of the last run is left in L2, and the host gets ahead of the GPU
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [max(start.elapsed_time(end) * 1e-3 - self.overhead, 1e-9) for start, end in pairs]


def is_emulated() -> bool:
    """Whether the CUDA device of this process is Maya's own."""
    return build._native is not None and bool(build._native.installed())


def require_gpu() -> str:
    """The name of the GPU to measure, as its driver has it."""
    if is_emulated():
        raise MayaError(
            "the GPU of this process is emulated: its times are Maya's own predictions, and there is nothing to measure.",
            "Run `maya calibrate measure` by itself, on a machine with the GPU.",
        )
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " This torch is a CPU build; a CUDA build is needed as well."
        raise MayaError(
            f"there is no CUDA GPU here.{built}",
            "Run this on a machine with the GPU and copy the file it writes, or calibrate from what you have: "
            "`maya calibrate kineto TRACE.json` reads a profiler trace, `maya calibrate nccl OUTPUT.txt` nccl-tests.",
        )
    return torch.cuda.get_device_name()
