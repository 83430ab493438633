"""Predicts the duration of kernels that are bound by moving bytes.

The duration is a floor plus the traffic divided by the share of the data sheet's bandwidth that the pattern reaches. If a block processes each
row, few rows leave the GPU partly idle, and rows that are too long for the chip are read again. A lattice corrects what this does not explain
(caches, ramps, waves), over traffic in units of the L2 cache, or over rows per SM and the length of a row. Both apply to other GPUs, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from maya_core.hardware.models import Gpu
from maya_core.ops import kernel
from maya_core.ops.kernel import Columns
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.family import Family, by_model, peak_flops
from maya_core.predictor.lattice import Axis, Lattice
from maya_core.predictor.profile import Found, find_profile

FAMILY = "memory"
READ, WRITTEN, ELEMENTS, ROW = range(4)

# Patterns in which a block processes a row; in the others, all blocks share the work whatever its shape.
BY_ROW = ("norm", "norm_backward", "softmax", "warp_softmax", "softmax_backward")
ALONE = 4.0  # times its equal share of the bandwidth that an SM reaches when few others are busy
NOMINAL_BYTES = 8  # of an element of a row, read and written, to compute rows from traffic
TRAFFIC_AXIS = Axis(-14.0, 8.0, 2)  # log2 of traffic / L2
ROW_AXES = (Axis(-6.0, 10.0), Axis(5.0, 18.0))  # log2 of rows per SM, of row length

# The throughput of an SM where it is the bound, and not DRAM. Layer norms reach 1.1, 2.0 and 2.1 TB/s on A100, H100 and B200, in
# float and in bfloat16 alike: 7 to 8 bytes per cycle of an SM. Softmaxes depend on elements, with 0.6 to 0.9 cycles each on
# H100 and B200, and so do elementwise kernels without vector loads, with 0.8 to 1 on A100, H100 and B200.
BYTES_PER_CYCLE = {"norm": 10.0, "norm_backward": 12.0, "column_reduction": 12.0}
CYCLES_PER_ELEMENT = {"softmax": 0.57, "warp_softmax": 0.57, "softmax_backward": 0.33, "strided": 0.8}

# SoftMax.cu: for rows that fit neither in registers nor in shared memory, the input is read three times, and in backward the gradient
# twice. L2 serves these reads while it holds the rows that are being processed, two for each SM.
READ_AGAIN = {"softmax": 2.0, "softmax_backward": 0.5}
ROWS_AT_ONCE = 2
KEPT_ON_SM = 48 * 1024  # bytes of the longest row that fits in shared memory
KEPT_IN_L2 = 0.5  # share of L2 that serves repeated reads

# LossNLL: one warp processes all targets, 32 at a time, and each round waits for memory twice. 1 us per round was chosen by hand to
# match cross entropies on A100; no other GPU was checked.
SERIAL = {"loss": (32, 1.0e-6)}


class Relative(NamedTuple):
    """A pattern that was not measured separately: it takes `factor` times as long as another one."""

    model: str
    factor: float


# Two factors were chosen by hand to match eager chains: moments from group norms on B200, casts from RMS norms on A100. All others that
# are not 1 are estimated, not measured.
RELATIVES = {
    "cast": Relative("strided", 1.1),
    "transpose": Relative("strided", 1.5),
    "moments": Relative("norm", 2.4),
    "multi_tensor": Relative("elementwise", 1.0),
    "cat": Relative("elementwise", 1.05),
    "gather": Relative("elementwise", 1.1),
    "pool": Relative("elementwise", 1.2),
    "scan": Relative("elementwise", 1.2),
    "scatter": Relative("elementwise", 1.5),
    "sort": Relative("elementwise", 2.0),
    "random": Relative("fill", 1.3),
    "select": Relative("reduction", 1.5),
    "column_reduction": Relative("reduction", 1.3),
    "channel_reduction": Relative("reduction", 1.3),
    "loss": Relative("elementwise", 1.0),
    "other": Relative("elementwise", 1.0),
}
# Patterns in profiles. A GPU that is not near to any profile treats them as elementwise.
MEASURED = (
    "elementwise", "strided", "fill", "reduction", "column_reduction", "norm", "norm_backward", "softmax", "warp_softmax",
    "softmax_backward", "dropout",
)  # fmt: skip
ELEMENTWISE = Relative("elementwise", 1.0)
BOUND_ONLY = ("other",)
DATA_SHEET_SHARE = 0.85  # if no profile is near
FLOOR_US = 2.0


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one pattern on one GPU."""

    floor_s: float
    share: float  # of the data sheet's bandwidth
    correction: Lattice | None = None

    @staticmethod
    def load(stored: dict[str, Any]) -> Coefficients:
        lattice = Lattice.load(stored["correction"]) if stored.get("correction") else None
        return Coefficients(stored["floor_us"] * 1e-6, stored["share"], lattice)

    def store(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"floor_us": round(self.floor_s * 1e6, 3), "share": round(self.share, 4)}
        if self.correction is not None:
            kept["correction"] = self.correction.store().model_dump()
        return kept


def traffic(gpu: Gpu, model: str, sizes: np.ndarray) -> np.ndarray:
    """The bytes through DRAM, including repeated reads."""
    total = sizes[:, READ] + sizes[:, WRITTEN]
    again = READ_AGAIN.get(model)
    answer: np.ndarray = total if again is None else total + again * missed(gpu, sizes)
    return answer


def missed(gpu: Gpu, sizes: np.ndarray) -> np.ndarray:
    """The bytes that DRAM must serve again if all rows are read a second time."""
    row_bytes = sizes[:, READ] / np.maximum(sizes[:, ELEMENTS], 1) * sizes[:, ROW]
    crowding = row_bytes * ROWS_AT_ONCE * gpu.sms / (gpu.l2_bytes * KEPT_IN_L2)
    answer: np.ndarray = sizes[:, READ] * _from(row_bytes / KEPT_ON_SM) * _from(crowding)
    return answer


def _from(share: np.ndarray) -> np.ndarray:
    """0 up to half of the limit, 1 from the limit on, and in between linear."""
    answer: np.ndarray = np.clip(np.log2(np.maximum(share, 1e-9)) + 1, 0, 1)
    return answer


def effective_bytes(gpu: Gpu, model: str, sizes: np.ndarray) -> np.ndarray:
    """The bytes that DRAM could move in the time of the kernel's bound: its traffic, or more if the SMs are the bound."""
    moved = traffic(gpu, model, sizes)
    bytes_per_cycle = gpu.memory_bandwidth_bytes_per_s / (gpu.sms * gpu.boost_clock_mhz * 1e6)
    if model in BYTES_PER_CYCLE:
        moved = moved * max(1.0, bytes_per_cycle / BYTES_PER_CYCLE[model])
    if model in CYCLES_PER_ELEMENT:
        moved = np.maximum(moved, sizes[:, ELEMENTS] * CYCLES_PER_ELEMENT[model] * bytes_per_cycle)
    return moved


def place(gpu: Gpu, model: str, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """The coordinates of the correction: effective bytes in units of the L2 cache, or rows per SM and the length of a row."""
    moved = effective_bytes(gpu, model, sizes)
    if model in BY_ROW:
        row = np.maximum(sizes[:, ROW], 1)
        return moved / (NOMINAL_BYTES * row * gpu.sms), row
    return (moved / gpu.l2_bytes,)


def growth(model: str, *where: np.ndarray) -> np.ndarray:
    """How structural time beyond the floor grows over the coordinates, on any GPU. A single row is not faster than `ALONE` allows."""
    if model in BY_ROW:
        answer: np.ndarray = np.maximum(where[0], 1 / ALONE) * where[1]
        return answer
    return where[0]


def streaming(gpu: Gpu, model: str, share: float, sizes: np.ndarray) -> np.ndarray:
    """The seconds beyond the floor, from structure alone."""
    unit = NOMINAL_BYTES * gpu.sms if model in BY_ROW else gpu.l2_bytes
    return growth(model, *place(gpu, model, sizes)) * unit / (gpu.memory_bandwidth_bytes_per_s * share)


def evaluate(gpu: Gpu, model: str, coefficients: Coefficients, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns seconds, and whether measurements surround the sizes. The floor is not corrected, so that doubling costs time on any GPU."""
    seconds = streaming(gpu, model, coefficients.share, sizes)
    backed = np.zeros(len(sizes), bool)
    if coefficients.correction is not None:
        factor, backed = coefficients.correction(*place(gpu, model, sizes))
        seconds = seconds * factor
    return coefficients.floor_s + seconds, backed


def _coefficients(gpu: Gpu, model: str) -> tuple[Coefficients, Found | None]:
    found = find_profile(FAMILY, gpu, model)
    if found is None:
        return Coefficients(FLOOR_US * 1e-6, DATA_SHEET_SHARE), None
    return Coefficients.load(found.profile.models[model]), found


def predict(gpu: Gpu, model: str, sizes: np.ndarray) -> Durations:
    """The durations of kernels of one pattern. `sizes` has a row (bytes read, written, elements, row length) for each."""
    sizes = np.asarray(sizes, np.float64).reshape(-1, 4)
    coefficients, found = _coefficients(gpu, model)
    fitted, factor = model, 1.0
    if found is None:
        if model not in RELATIVES and model not in MEASURED:
            raise ValueError(f"no pattern '{model}'; there are {', '.join(sorted({*RELATIVES, *MEASURED}))}")
        fitted, factor = RELATIVES.get(model, ELEMENTWISE)
        coefficients, found = _coefficients(gpu, fitted)
    seconds, backed = evaluate(gpu, fitted, coefficients, sizes)
    floor = coefficients.floor_s
    seconds = floor + np.maximum(seconds - floor, 0) * factor if factor != 1.0 else seconds
    if model in SERIAL:
        each, latency = SERIAL[model]
        seconds = np.maximum(seconds, floor + np.ceil(sizes[:, ELEMENTS] / each) * latency)
    own = found is not None and found.own and fitted == model
    provenance = np.where(backed & own, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED)
    if found is None or model in BOUND_ONLY:
        provenance = np.full(len(sizes), Provenance.BOUND)
    return Durations.of(seconds, provenance.astype(np.uint8), found.name if found else "data sheet")


def table(those: Columns) -> np.ndarray:
    """A table of kernels, with the bytes read, bytes written, elements and row length of each."""
    return np.stack([those.read, those.written, those.elements, those.row], axis=1)


class MemoryBound(Family[kernel.Streaming]):
    name, title, precedence = "memory", "memory-bound", -2

    def predict(self, kernels: Sequence[kernel.Streaming]) -> Durations:
        return by_model(kernels, lambda pattern, those: predict(self.gpu, pattern, table(Columns(those))))


class GeneratedKernels(Family[kernel.Generated]):
    """Kernels written in Triton, to which no coefficients were fitted."""

    name, title = "triton", "Triton kernels"

    def predict(self, kernels: Sequence[kernel.Generated]) -> Durations:
        return by_model(kernels, self._of_pattern)

    def _of_pattern(self, pattern: str, kernels: list[kernel.Generated]) -> Durations:
        those = Columns(kernels)
        moved = table(those)
        moved[:, READ] += those.rereads * missed(self.gpu, moved)
        return predict(self.gpu, pattern, moved).slowed(1.0, Provenance.EXTRAPOLATED)


class UnknownKernels(Family[kernel.Unknown]):
    """Kernels of ops that were not measured: the longer of streaming their bytes and of computing at the peak, which is a lower bound."""

    name, title, precedence = "unknown", "not described", -3

    def predict(self, kernels: Sequence[kernel.Unknown]) -> Durations:
        those = Columns(kernels)
        moved = np.stack([those.read, those.written, those.elements, np.zeros_like(those.read)], axis=1)
        streamed = predict(self.gpu, "elementwise", moved).slowed(1.0, Provenance.BOUND)
        peaks = np.array([peak_flops(self.gpu, dtype) for dtype in ("float32", "float64")])
        return replace(streamed, seconds=np.maximum(streamed.seconds, those.flops / peaks[those.double.astype(int)]))
