"""Predicts the duration of copies between host and device over PCIe or NVLink-C2C, and within the device's memory.

A trace does not say whether host memory was pinned. It is assumed to be, as with data loaders; copies of pageable memory take `PAGEABLE` times
as long and also block the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maya_core.hardware.models import Gpu
from maya_core.ops import kernel
from maya_core.ops.kernel import Columns
from maya_core.predictor import streaming_time
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.family import Family, by_model

# Profiles of training (HTA): pinned copies of 1 to 32 MB reach 11.4-11.9 GB/s on an A100 host, 5.7-7.5 on a V100 host, pageable
# ones 6.3 GB/s; small ones take 1-5 us. The share assumes that the A100 host has PCIe 3.0 x16 (15.75 GB/s), which the profile does
# not say: with 4.0, the share would be half.
PINNED_SHARE = 0.76
PAGEABLE = 1.9  # times as long
HOST_FLOOR_US = {"h2d": 1.5, "d2h": 2.0}

# A memcpy within the device reaches 0.86 (V100) and 0.78 (A100) of the bandwidth in the same profiles, counting reads and writes.
DEVICE_SHARE = 0.8
DEVICE_FLOOR_US = 1.5


def predict(gpu: Gpu, direction: str, nbytes: np.ndarray, pinned: bool = True) -> Durations:
    """The durations of copies in one direction (h2d, d2h, d2d)."""
    if direction == "d2d":
        coefficients = streaming_time.Coefficients(DEVICE_FLOOR_US * 1e-6, DEVICE_SHARE)
        table = np.stack([nbytes, nbytes, nbytes / 4, np.zeros_like(nbytes)], axis=1)
        seconds, _ = streaming_time.evaluate(gpu, "copy", coefficients, table)
        return Durations.of(seconds, Provenance.EXTRAPOLATED, "copies")
    rate = gpu.host_link_bytes_per_s * PINNED_SHARE
    seconds = HOST_FLOOR_US[direction] * 1e-6 + nbytes / rate * (1.0 if pinned else PAGEABLE)
    return Durations.of(seconds, Provenance.EXTRAPOLATED, "copies")


class Copies(Family[kernel.Copy]):
    name, title, precedence = "copy", "copies", -1

    def predict(self, kernels: Sequence[kernel.Copy]) -> Durations:
        return by_model(kernels, lambda direction, those: predict(self.gpu, direction, Columns(those).bytes))
