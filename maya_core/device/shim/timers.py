"""torch.utils.benchmark reads predicted time: a machine's own clock says how long the emulation takes, not the GPU. Checked with torch 2.13."""

from __future__ import annotations

import timeit
from types import ModuleType
from typing import Any

from maya_core.patches import Patches


class PredictedTime:
    """In the place of the module `timeit` where torch's timer looks for a clock."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._predicted = 0.0  # when it was last read
        self._real = timeit.default_timer()
        self._on_host = 0.0  # spent in statements that asked nothing of the device

    def default_timer(self) -> float:
        """Seconds. A statement that does nothing on the device is timed as it runs."""
        self._native.start_timing()
        predicted, real = self._native.host_time_ns() * 1e-9, timeit.default_timer()
        if predicted == self._predicted:
            self._on_host += real - self._real
        self._predicted, self._real = predicted, real
        return predicted + self._on_host

    def __getattr__(self, name: str) -> Any:
        return getattr(timeit, name)


def install(native: ModuleType, patches: Patches) -> None:
    patches.when_imported(
        "torch.utils.benchmark.utils.timer", lambda module: patches.set(module, "timeit", PredictedTime(native))
    )
