"""Counts the kernels, copies and memsets of a trace on the GPU for which it was recorded."""

from __future__ import annotations

import numpy as np

from maya_core.hardware.catalog import find_gpu
from maya_core.ops.plan import kernels_of
from maya_core.predictor.pricing import platform_of
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind


def launches(trace: RankTrace, events: np.ndarray | None = None) -> int:
    """The number for these events of the trace, or for all."""
    chosen = trace.events if events is None else events
    numbers, times = np.unique(chosen["subject"][chosen["kind"] == EventKind.OP], return_counts=True)
    platform = platform_of(trace, find_gpu(trace.meta["gpu"]))
    return sum(
        count * len(kernels_of(trace.calls[number], platform))
        for number, count in zip(numbers.tolist(), times.tolist(), strict=True)
    )
