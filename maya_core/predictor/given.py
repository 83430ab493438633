"""Kernels whose duration is given: by the author of an op, or as part of another kernel with which they were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maya_core.ops import kernel
from maya_core.ops.kernel import Columns
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.family import Family


class IncludedKernels(Family[kernel.Included]):
    name, title, precedence = "included", "with another kernel", -4

    def predict(self, kernels: Sequence[kernel.Included]) -> Durations:
        return Durations.of(np.zeros(len(kernels)), Provenance.INTERPOLATED, "with another kernel")


class TimedKernels(Family[kernel.Timed]):
    name, title = "timed", "timed by their author"

    def predict(self, kernels: Sequence[kernel.Timed]) -> Durations:
        return Durations.of(Columns(kernels).seconds, Provenance.MEASURED, "the op's author")
