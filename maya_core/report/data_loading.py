"""What data loading adds to a step, and copies of memory that is not pinned."""

from __future__ import annotations

import numpy as np

from maya_core.predictor import copy_time
from maya_core.report.analysis import Analysis
from maya_core.report.prediction import DataLoading, Prediction

LEAST_S = 1e-3
NOTICED = 1.01  # a whole step that takes less than this many times the step is not shown


def noticed_loading(prediction: Prediction) -> DataLoading | None:
    """What data loading adds, where that makes a difference."""
    loading, step = prediction.data_loading, prediction.step_time_s
    return loading if loading is not None and step and loading.whole_step_s >= NOTICED * step else None


def data_loading(analysis: Analysis) -> DataLoading | None:
    """Of the rank that waits longest; its ranks are assumed to have a data loader each, with workers of their own."""
    found = [each for each in (_of(analysis, rank) for rank in analysis.job.ranks) if each is not None]
    return max(found, key=lambda each: each.whole_step_s, default=None)


def _of(analysis: Analysis, rank: int) -> DataLoading | None:
    meta, step = analysis.job.ranks[rank].meta, analysis.step_time_s
    measured = meta.get("loading")
    if not measured or not step or not (_rounded(measured["batch_s"]) or measured["pageable_bytes"]):
        return None
    steps = (meta.get("data") or {}).get("steps", [])[: analysis.steps]
    batches = float(np.mean([each["batches"] for each in steps])) if steps else 0.0
    batch_s = _rounded(measured["batch_s"])
    made = batch_s * batches
    workers = measured["workers"]
    slower = _slower(analysis, measured["pageable_bytes"])
    wait = max(0.0, made / workers - step - slower) if workers else made
    return DataLoading(
        batch_s=batch_s,
        batches_per_step=batches,
        workers=workers,
        wait_s=wait,
        pageable_bytes_per_step=measured["pageable_bytes"],
        pageable_s=slower,
        whole_step_s=step + slower + wait,
    )


def _rounded(seconds: float) -> float:
    """Two digits of what was measured, and nothing of less than a millisecond: it differs from one run to the next."""
    return float(f"{seconds:.1e}") if seconds >= LEAST_S else 0.0


def _slower(analysis: Analysis, nbytes: int) -> float:
    """How much longer copies of pageable memory take than those of pinned memory, at which steps are priced."""
    pinned, pageable = (
        float(copy_time.predict(analysis.cluster.gpu, "h2d", np.array([float(nbytes)]), pinned=each).seconds[0])
        for each in (True, False)
    )
    return pageable - pinned
