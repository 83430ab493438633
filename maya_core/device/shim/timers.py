"""Makes torch.utils.benchmark read predicted time: the clock of this machine measures the emulation, not the GPU."""

from __future__ import annotations

import timeit
from types import ModuleType
from typing import Any

from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam


class PredictedTime:
    """Replaces the module `timeit`, from which torch's timer takes its clock."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._predicted = 0.0  # the device time at the last reading
        self._real = timeit.default_timer()
        self._on_host = 0.0  # real seconds spent in statements that used no device

    def default_timer(self) -> float:
        """Returns seconds. A statement that does nothing on the device counts with the real time that it took."""
        self._native.start_timing()
        predicted, real = self._native.host_time_ns() * 1e-9, timeit.default_timer()
        if predicted == self._predicted:
            self._on_host += real - self._real
        self._predicted, self._real = predicted, real
        return float(predicted + self._on_host)

    def __getattr__(self, name: str) -> Any:
        return getattr(timeit, name)


def install(native: ModuleType, patches: Patches) -> None:
    seam.BENCHMARK_CLOCK.replace(patches, PredictedTime(native))
