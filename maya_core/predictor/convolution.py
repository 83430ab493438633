"""Convolutions: cuDNN's implicit matrix multiplications, forward and for either gradient.

An output pixel is a row, an output channel a column, and what a filter reaches the inner dimension; the gradients swap their
roles. Memory sees images and filters once, not the unfolded matrix. Filters of one channel each (depthwise) multiply
next to nothing and are priced as traffic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from maya_core.hardware.catalog import Gpu
from maya_core.predictor.gemm import ITEM_BYTES, GemmStructure
from maya_core.predictor.lattice import Lattice, StoredLattice, Surface, knot_sizes

DIRECTIONS = ("forward", "dgrad", "wgrad")
DEPTHWISE_SHARE = 0.35  # of bandwidth, as DepthwiseConv2d.cu's plain loads reach: not measured
WINOGRAD_FILTER = 9  # 3 x 3, stride 1


class ConvolutionModel(BaseModel):
    """One dtype, one direction."""

    model_config = ConfigDict(extra="forbid")

    structure: GemmStructure
    correction: StoredLattice  # over rows, columns, inner dimension
    winograd: float = 1.0  # factor on the time of 3 x 3 filters of stride 1


def as_product(
    direction: np.ndarray, batch: np.ndarray, c_in: np.ndarray, c_out: np.ndarray, groups: np.ndarray,
    pixels_in: np.ndarray, pixels_out: np.ndarray, volume: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Rows, columns and inner dimension of the matrix product of one group."""
    few_in, few_out = c_in / groups, c_out / groups
    # each strided input pixel is reached by only part of the filter: as many products as forward
    reached = few_out * volume * pixels_out / np.maximum(pixels_in, 1)
    rows = np.select([direction == 0, direction == 1], [batch * pixels_out, batch * pixels_in], few_out)
    columns = np.select([direction == 0, direction == 1], [few_out, few_in], few_in * volume)
    inner = np.select([direction == 0, direction == 1], [few_in * volume, reached], batch * pixels_out)
    return rows, columns, np.maximum(inner, 1)


class Convolution:
    """A fitted model on a GPU, ready to predict: structure and correction, put together once at the knots."""

    def __init__(self, stored: ConvolutionModel | dict[str, Any], gpu: Gpu, dtype: str) -> None:
        self.model = stored if isinstance(stored, ConvolutionModel) else ConvolutionModel.model_validate(stored)
        self.dtype = dtype
        self.known = correction = Lattice.load(self.model.correction)
        knots = knot_sizes(correction.axes)
        self.surface = Surface.of(multiplied(self.model.structure, gpu, dtype, *knots), correction)
        self._floor = self.model.structure.floor_us * 1e-6
        self._bandwidth = gpu.memory_bandwidth_bytes_per_s
        self._bytes_per_s = self._bandwidth * self.model.structure.memory_share

    def seconds(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and whether measurements surround the shape. A row of `sizes` is as `kernels` describes convolutions:

        direction, batch, channels in and out, groups, pixels in and out, filter volume, channels last, stride product.
        """
        sizes = np.atleast_2d(np.asarray(sizes, float))
        direction, stride = sizes[:, 0], sizes[:, 9]
        shape = [np.maximum(size, 1) for size in sizes.T[1:8]]
        _, c_in, _, groups, _, _, volume = shape
        rows, columns, inner = as_product(direction, *shape)
        moved = traffic(self.dtype, *shape)
        place = (groups * rows, columns, inner)
        seconds, inside = self.surface(*place), self.known(*place)[1]
        seconds = np.where((volume == WINOGRAD_FILTER) & (stride == 1), seconds * self.model.winograd, seconds)
        seconds = np.maximum(seconds, moved / self._bytes_per_s + self._floor)
        depthwise = (groups > 1) & (groups == c_in)
        seconds = np.where(depthwise, moved / (self._bandwidth * DEPTHWISE_SHARE) + self._floor, seconds)
        empty = np.prod(sizes[:, [1, 2, 3, 6]], axis=1) <= 0
        return np.where(empty, 0.0, seconds), inside & (groups == 1)


def multiplied(
    structure: GemmStructure, gpu: Gpu, dtype: str, rows: np.ndarray, columns: np.ndarray, inner: np.ndarray
) -> np.ndarray:
    """Structural time of the product alone, whatever memory takes."""
    return structure.seconds(gpu, dtype, np.ones_like(rows), rows, columns, inner, np.zeros_like(rows))


def traffic(
    dtype: str, batch: np.ndarray, c_in: np.ndarray, c_out: np.ndarray, groups: np.ndarray, pixels_in: np.ndarray,
    pixels_out: np.ndarray, volume: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Bytes of images in, images out and filters, whichever of them is the result."""
    return ITEM_BYTES[dtype] * (batch * (c_in * pixels_in + c_out * pixels_out) + c_in / groups * c_out * volume)
