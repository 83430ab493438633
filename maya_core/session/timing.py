"""Durations for programs that time their GPU while they are emulated: CUDA events, torch.utils.benchmark, inductor's benchmarks. The
predictor is created with the first question; a program that times nothing pays nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from maya_core.hardware.catalog import find_gpu
from maya_core.ops.kernel import Kernel
from maya_core.request import Request
from maya_core.trace.communication import CollectiveCall, Communicator

if TYPE_CHECKING:
    from maya_core.predictor.pricing import Predictor


class ProgramTiming:
    """Predicted durations on the requested GPU, without calibrations."""

    def __init__(self, request: Request) -> None:
        self.request = request

    @cached_property
    def _predictor(self) -> Predictor:
        from maya_core.predictor.pricing import Predictor  # with its profiles, which most programs never need

        return Predictor(find_gpu(self.request.gpu_name))

    def kernel_seconds(self, kernels: Sequence[Kernel]) -> np.ndarray:
        return self._predictor.kernels(list(kernels)).seconds

    def collective_seconds(
        self, call: CollectiveCall, group: Communicator, world_size: int, ranks_per_node: int
    ) -> float:
        from maya_core.predictor.pricing import collective_durations

        machine = self.request.cluster(ranks_per_node, -(-world_size // ranks_per_node))
        return float(collective_durations(call, group, machine).seconds[0])
