"""Durations for programs that time their GPU while they are emulated: CUDA events, torch.utils.benchmark, inductor's benchmarks. The
predictor is created with the first question; a program that times nothing pays nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from maya_core.hardware.cluster import Cluster
from maya_core.hardware.models import Gpu
from maya_core.ops.kernel import Kernel
from maya_core.trace.communication import CollectiveCall, Communicator

if TYPE_CHECKING:
    from maya_core.predictor.pricing import Predictor


class ProgramTiming:
    """Predicted durations on a GPU, without calibrations."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    @cached_property
    def _predictor(self) -> Predictor:
        from maya_core.predictor.pricing import Predictor  # with its profiles, which most programs never need

        return Predictor(self.gpu)

    def kernel_seconds(self, kernels: Sequence[Kernel]) -> np.ndarray:
        return self._predictor.kernels(list(kernels)).seconds


def collective_seconds(call: CollectiveCall, group: Communicator, machine: Cluster) -> float:
    from maya_core.predictor.pricing import collective_durations

    return float(collective_durations(call, group, machine).seconds[0])
