"""Matrix multiplications: C[m,n] = A[m,k] B[k,n], `batch` times over.

Structure: a library of kernels, each computing tiles of C on one SM and possibly splitting k over several; the fastest is
taken to run, as cuBLAS's heuristics would. A kernel takes as long as its waves of tiles, or as its traffic to memory or to
L2, whichever is longer. Every candidate grows with every size, and so does the fastest of them. What was measured corrects
smoothly over a grid of sizes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from maya_core.hardware.catalog import Gpu
from maya_core.predictor.lattice import Lattice, StoredLattice, knot_sizes

TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (192, 128), (128, 256), (256, 128))
SPLITS = (1, 2, 4, 8, 16)
LAYOUTS = ("TN", "NN", "NT", "TT")  # of x @ W.t(), of grad @ W, of grad.t() @ x, and of neither contiguous
ITEM_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
SHARPNESS = 4  # how suddenly one bound takes over from another
SMALLEST_TILE = 0.25  # of a tile: work on less costs the same


class GemmStructure(BaseModel):
    """What tiles, waves and traffic cost on a GPU, as shares of its data sheet, and times in microseconds."""

    model_config = ConfigDict(extra="forbid")

    tile_efficiency: list[float]  # of the SM's peak, by tile
    tile_us: float  # start and end of a tile of 128 x 128; grows with its edge
    wave_us: float
    floor_us: float
    memory_share: float  # of DRAM bandwidth
    l2_share: float  # bandwidth of L2, in multiples of DRAM's
    split_share: float  # traffic of partial sums when k is split, in multiples of what it must be
    wave_quantization: float  # 1: a last wave costs a whole one; 0: only its share
    tile_quantization: float  # the same of tiles at the edge of C

    def seconds(
        self, gpu: Gpu, dtype: str, batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray,
        moved: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """`moved` is the traffic to memory in bytes, if it is not that of the three matrices."""
        peak_per_sm = peak_flops(gpu, dtype) / gpu.sms
        item, bandwidth = ITEM_BYTES[dtype], gpu.memory_bandwidth_bytes_per_s
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
        return self.tile_quantization * np.ceil(tiles) + (1 - self.tile_quantization) * np.maximum(tiles, SMALLEST_TILE)


class Sustained(BaseModel):
    """How much slower than in short bursts, once power and clocks have settled."""

    model_config = ConfigDict(extra="forbid")

    correction: StoredLattice  # over batch, m, n, k
    layouts: dict[str, float]  # factor by layout


class GemmModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    structure: GemmStructure
    correction: StoredLattice  # over batch, m, n, k
    sustained: Sustained | None = None


class Gemm:
    """A fitted model on a GPU, ready to predict."""

    def __init__(
        self, stored: GemmModel | dict[str, Any], gpu: Gpu, dtype: str, *, burst: bool = False, corrected: bool = True
    ) -> None:
        """Without what sustained load costs if `burst`; by structure alone if not `corrected`."""
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
        self._structure, self._gpu, self._dtype = model.structure, gpu, dtype
        if not corrected:
            correction = replace(correction, values=np.zeros_like(correction.values))
        self.correction = correction.lifted(self.structural(*knot_sizes(correction.axes)))

    def structural(self, *sizes: np.ndarray) -> np.ndarray:
        return self._structure.seconds(self._gpu, self._dtype, *sizes)

    def seconds(self, batch: Any, m: Any, n: Any, k: Any, layout: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and whether measurements surround the shape."""
        given = [np.atleast_1d(np.asarray(size, float)) for size in (batch, m, n, k)]
        # less than the least that was measured is taken to cost as much: kernels compute whole tiles
        sizes = [np.maximum(size, low) for size, low in zip(np.broadcast_arrays(*given), self.least, strict=True)]
        seconds, inside = self.corrected(*sizes)
        # A fit keeps its correction from falling where structure does not rise, as far as it looked. For what it did
        # not see, and for other GPUs than its own: work is not faster than half of it.
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
        """Structural time as measurements correct it, for sizes of at least the least."""
        if self._batched:
            factor, inside = self.correction(batch, m, n, k)
        else:  # a batch fills the GPU as more rows would
            factor, inside = self.correction(np.ones_like(batch), batch * m, n, k)
            inside = inside & (batch == 1)
        return self.structural(batch, m, n, k) * factor, inside


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """The data sheet's rate for a dtype, or for what stands in for it where the GPU lacks it."""
    for name in (dtype, {"bfloat16": "float32", "tf32": "float32", "float8": "bfloat16"}.get(dtype, "float32")):
        if name in gpu.peak_flops:
            return gpu.peak_flops[name]
    return gpu.peak_flops["float32"]
