"""Benchmarks that inductor would run on the GPU are answered with predicted durations: the work runs once, unrecorded, and is priced.
The answer is the same every time, and the program's memory is not touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from maya_core.device.planner import Planner
from maya_core.ops.kernel import Gemm, Kernel
from maya_core.ops.plan import kernels_of
from maya_core.patches import Patches
from maya_core.torch_seam import compile as seam

SHORTEST_MS = 1e-4  # of nothing at all: inductor divides by what it is told
# The predictor prices products as if aligned, for want of a table of others; profiles show them take two to three times as long
# (docs/predictor.md). Whether to pad is a choice between the two, so here they differ.
MISALIGNED = 2.0


@contextmanager
def aside(native: ModuleType) -> Iterator[list[int]]:
    """Work within is none of the program's. Gives the numbers of the calls made, once it is over."""
    done: list[int] = []
    native.begin_aside()
    try:
        yield done
    finally:
        done += native.end_aside()


class Prices:
    """What work would take on the GPU, in milliseconds."""

    def __init__(self, native: ModuleType, planner: Planner) -> None:
        self.native = native
        self.planner = planner

    def of(self, work: Callable[[], Any]) -> float:
        with aside(self.native) as numbers:
            work()
        calls = [self.planner.calls[number] for number in numbers]
        kernels = [kernel for call in calls for kernel in kernels_of(call, self.planner.platform)]
        slower = np.array([MISALIGNED if misaligned(kernel) else 1.0 for kernel in kernels])
        return max(float((self.planner.kernel_seconds(kernels) * slower).sum()) * 1e3, SHORTEST_MS)


def misaligned(kernel: Kernel) -> bool:
    """A product of half precision whose rows do not begin on 16 bytes."""
    return isinstance(kernel, Gemm) and kernel.dtype in ("bfloat16", "float16") and bool(kernel.n % 8 or kernel.k % 8)


def install(prices: Prices, patches: Patches) -> None:
    def benchmark_gpu(self: Any, work: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        ms = prices.of(work)
        return [ms] if kwargs.get("return_mode") == "all" else ms

    def made_for_benchmarks(function: Callable[..., Any]) -> Callable[..., Any]:
        """What a function allocates is only there to be timed."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with aside(prices.native):
                return function(*args, **kwargs)

        return run

    for benchmark in seam.BENCHMARKS:
        benchmark.replace(patches, benchmark_gpu)
    for function in (*seam.SHOULD_PAD, *seam.BENCHMARK_CHOICES):
        function.wrap(patches, made_for_benchmarks)
