"""Matrix multiplications: C[m,n] = A[m,k] B[k,n], `batch` times.

Structure: a library of kernels, each of which computes tiles of C on one SM and may split k over several. The fastest is assumed to run, as
with cuBLAS's heuristics. A kernel takes as long as its waves of tiles, or its traffic to memory or L2, whichever is longer. Every candidate
grows with every size, and so does the fastest. Measurements correct the structural time smoothly over a grid of sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from maya_core.hardware.dtypes import RATE_BYTES
from maya_core.hardware.models import Gpu
from maya_core.ops import kernel
from maya_core.ops.kernel import Columns
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.family import Family, Target, by_model, in_order, known, peak_flops
from maya_core.predictor.lattice import Lattice, StoredLattice, knot_sizes

TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (192, 128), (128, 256), (256, 128))
SPLITS = (1, 2, 4, 8, 16)
LAYOUTS = ("TN", "NN", "NT", "TT")  # x @ W.t(), grad @ W, grad.t() @ x, and both operands transposed
SHARPNESS = 4  # how sharp the transition is from one bound to another
SMALLEST_TILE = 0.25  # of a tile: smaller work costs the same


class GemmStructure(BaseModel):
    """The costs of tiles, waves and traffic on a GPU: shares of the data sheet's rates, and times in microseconds."""

    model_config = ConfigDict(extra="forbid")

    tile_efficiency: list[float]  # of the SM's peak, by tile
    tile_us: float  # start and end of a tile of 128 x 128; grows with its edge
    wave_us: float
    floor_us: float
    memory_share: float  # of DRAM bandwidth
    l2_share: float  # bandwidth of L2, in multiples of DRAM's
    split_share: float  # traffic of partial sums when k is split, in multiples of the minimum
    wave_quantization: float  # 1: a partial last wave costs a whole one; 0: only its share
    tile_quantization: float  # the same for tiles at the edge of C

    def seconds(
        self, gpu: Gpu, dtype: str, batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray,
        moved: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The structural seconds. `moved` is the traffic to memory in bytes, if it is not that of the three matrices."""
        peak_per_sm = peak_flops(gpu, dtype) / gpu.sms
        item, bandwidth = RATE_BYTES[dtype], gpu.memory_bandwidth_bytes_per_s
        out_item = 2 if dtype == "float8" else item
        if moved is None:
            moved = batch * (item * (m * k + n * k) + out_item * m * n)
        memory = moved / (bandwidth * self.memory_share)
        best = np.full(np.broadcast(batch, m, n, k).shape, np.inf)
        for (rows, columns), efficiency in zip(TILES, self.tile_efficiency, strict=True):
            tiles = batch * self._edges(m / rows) * self._edges(n / columns)
            l2 = tiles * (rows + columns) * k * item / (bandwidth * self.l2_share)
            overhead = (self.tile_us * (rows * columns) ** 0.5 / 128 + self.wave_us) * 1e-6
            flops = 2 * rows * columns / (peak_per_sm * efficiency)
            partial_sums = self.split_share * 4 * batch * m * n / bandwidth
            traffic = memory**SHARPNESS + l2**SHARPNESS
            for split in SPLITS:
                share = tiles * split / gpu.sms
                waves = self.wave_quantization * np.ceil(share)
                waves += (1 - self.wave_quantization) * np.maximum(share, 1)
                compute = waves * (flops * k / split + overhead)
                time = (compute**SHARPNESS + traffic) ** (1 / SHARPNESS)
                if split > 1:
                    time = time + split * partial_sums + self.wave_us * 1e-6
                best = np.minimum(best, time)
        return best + self.floor_us * 1e-6

    def _edges(self, tiles: np.ndarray) -> np.ndarray:
        answer: np.ndarray = self.tile_quantization * np.ceil(tiles) + (1 - self.tile_quantization) * np.maximum(
            tiles, SMALLEST_TILE
        )
        return answer


class Sustained(BaseModel):
    """How much slower products are than in short bursts, once power and clocks have settled."""

    model_config = ConfigDict(extra="forbid")

    correction: StoredLattice  # over batch, m, n, k
    layouts: dict[str, float]  # factor by layout


class GemmModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    structure: GemmStructure
    correction: StoredLattice  # over batch, m, n, k
    sustained: Sustained | None = None


class FittedGemm:
    """A fitted model for a GPU."""

    def __init__(
        self, stored: GemmModel | dict[str, Any], gpu: Gpu, dtype: str, *, burst: bool = False, corrected: bool = True
    ) -> None:
        """`burst` omits the cost of sustained load; without `corrected`, structure alone is used."""
        model = stored if isinstance(stored, GemmModel) else GemmModel.model_validate(stored)
        self._structure, self._gpu, self._dtype = model.structure, gpu, dtype
        correction = Lattice.load(model.correction)
        self._layouts = np.ones(len(LAYOUTS))
        if model.sustained is not None and not burst:
            slower = Lattice.load(model.sustained.correction)(*knot_sizes(correction.axes))[0]
            correction = correction.times(slower)
            self._layouts = np.array([model.sustained.layouts.get(name, 1.0) for name in LAYOUTS])
        self._batched = correction.axes[0].count > 1
        self.least = [2**axis.low for axis in correction.axes]
        if not corrected:
            correction = replace(correction, values=np.zeros_like(correction.values))
        self.correction = correction.lifted(self.structural(*knot_sizes(correction.axes)))

    def structural(self, *sizes: np.ndarray) -> np.ndarray:
        return self._structure.seconds(self._gpu, self._dtype, *sizes)

    def seconds(self, batch: Any, m: Any, n: Any, k: Any, layout: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns seconds, and whether measurements surround the shape."""
        given = [np.atleast_1d(np.asarray(size, float)) for size in (batch, m, n, k)]
        # Sizes below the smallest measured one are assumed to cost the same, because kernels compute whole tiles.
        sizes = [np.maximum(size, low) for size, low in zip(np.broadcast_arrays(*given), self.least, strict=True)]
        seconds, inside = self.corrected(*sizes)
        # A fit ensures that its correction does not fall where structure does not rise, within its data. Outside of it, and for other
        # GPUs, this ensures that work is not faster than half of it.
        for halved in itertools.product((1, 2, 4), repeat=4 if (sizes[0] > 1).any() else 3):
            if max(halved) > 1:
                by = (1,) * (4 - len(halved)) + halved
                part = [np.maximum(size / b, low) for size, b, low in zip(sizes, by, self.least, strict=True)]
                seconds = np.maximum(seconds, self.corrected(*part)[0])
        empty = np.prod(np.broadcast_arrays(*given[:3]), axis=0) <= 0
        return np.where(empty, 0.0, seconds * self._layouts[np.asarray(layout, int)]), inside

    def corrected(
        self, batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The structural time with the correction by measurements, for sizes from the smallest measured one."""
        if self._batched:
            factor, inside = self.correction(batch, m, n, k)
        else:  # a batch fills the GPU as additional rows would
            factor, inside = self.correction(np.ones_like(batch), batch * m, n, k)
            inside = inside & (batch == 1)
        return self.structural(batch, m, n, k) * factor, inside


# The models for a dtype's products, in order of preference: both half precisions run at the same rate.
MODELS = {
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("bfloat16", "float16"),
    "float8": ("float8",),
    "int8": ("float8", "bfloat16"),
    "float32": ("float32",),
    "tf32": ("bfloat16",),
    "float64": ("float32",),
}
SAME_RATE = {("bfloat16", "float16"), ("float16", "bfloat16")}
# Grouped products relative to a batch of as many products of the same size, by layout: medians of SimuMax's 82 on B200, of which half are
# within 0.8 to 1.3 of that. On an A100 (11 products) they take as long.
GROUPED_SLOWER = {10: (1.2, 1.3, 1.57, 1.3), 12: (1.2, 1.3, 1.57, 1.3)}  # by compute capability


def price(
    target: Target, dtype: str, batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray, layout: np.ndarray,
    *, batched: bool = False,
) -> Durations:  # fmt: skip
    """The durations of products of one dtype. `batched`: use the model of batched kernels, if they were measured separately."""
    choices: tuple[str, ...] = MODELS.get(dtype, ("float32",))
    if batched:
        choices = (*(f"{choice} batched" for choice in choices), *choices)
    if (found := target.find("gemm", choices)) is None:
        return target.bound(dtype, 2 * batch * m * n * k)
    profile, model = found
    near = profile.near(target.gpu)
    gemm = target.fitted(
        profile, model, dtype,
        lambda stored: FittedGemm(stored, target.gpu, dtype, burst=target.burst, corrected=near),
    )  # fmt: skip
    seconds, inside = gemm.seconds(batch, m, n, k, layout.astype(int))
    alike = model.removesuffix(" batched") == dtype or (model, dtype) in SAME_RATE
    return known(seconds, inside & alike, profile)


def price_either(target: Target, dtype: str, columns: Columns) -> Durations:
    """Single and batched products use different models if they were measured separately."""
    parts = []
    for several in (False, True):
        places = np.flatnonzero((columns.batch > 1) == several)
        if len(places):
            sizes = [getattr(columns, name)[places] for name in ("batch", "m", "n", "k", "layout")]
            parts.append((places, price(target, dtype, *sizes, batched=several)))
    return in_order(parts)


class Products(Family[kernel.Gemm]):
    name, title, compute_bound = "gemm", "matrix products", True

    def predict(self, kernels: Sequence[kernel.Gemm]) -> Durations:
        return by_model(kernels, lambda dtype, those: price_either(self.target, dtype, Columns(those)))


class GroupedProducts(Family[kernel.GroupedGemm]):
    """Predicted as a batched product of equal groups, because a trace does not contain the rows of each group."""

    name, title, compute_bound = "grouped_gemm", "grouped products", True

    def predict(self, kernels: Sequence[kernel.GroupedGemm]) -> Durations:
        return by_model(kernels, self._of_dtype)

    def _of_dtype(self, dtype: str, kernels: list[kernel.GroupedGemm]) -> Durations:
        those = Columns(kernels)
        groups = np.maximum(those.groups, 1)
        found = price(self.target, dtype, groups, those.m / groups, those.n, those.k, those.layout)
        slower = np.array(GROUPED_SLOWER.get(self.gpu.compute_capability[0], (1.0,) * 4))
        return found.slowed(slower[those.layout.astype(int)], Provenance.EXTRAPOLATED)
