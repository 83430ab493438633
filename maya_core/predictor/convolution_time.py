"""Convolutions: cuDNN's implicit matrix multiplications, forward and for both gradients.

An output pixel is a row, an output channel is a column, and the inputs of a filter are the inner dimension; gradients exchange these roles.
Images and filters are read from memory once, not as the unfolded matrix. Depthwise convolutions hardly multiply and are priced as traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from maya_core.hardware.dtypes import RATE_BYTES
from maya_core.hardware.models import Gpu
from maya_core.ops import kernel
from maya_core.ops.kernel import FORWARD, INPUT_GRADIENT, Columns
from maya_core.predictor.durations import Durations
from maya_core.predictor.family import Family, by_model, in_order, known
from maya_core.predictor.gemm_time import GemmStructure
from maya_core.predictor.lattice import Lattice, StoredLattice, Surface, knot_sizes

DIRECTIONS = ("forward", "dgrad", "wgrad")
DEPTHWISE_SHARE = 0.35  # of bandwidth, for the plain loads of DepthwiseConv2d.cu; estimated, not measured
WINOGRAD_FILTER = 9  # 3 x 3, stride 1


class ConvolutionModel(BaseModel):
    """The coefficients for one dtype and one direction."""

    model_config = ConfigDict(extra="forbid")

    structure: GemmStructure
    correction: StoredLattice  # over rows, columns, inner dimension
    winograd: float = 1.0  # factor on the time of 3 x 3 filters of stride 1


def as_product(
    direction: np.ndarray, batch: np.ndarray, c_in: np.ndarray, c_out: np.ndarray, groups: np.ndarray,
    pixels_in: np.ndarray, pixels_out: np.ndarray, volume: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """The rows, columns and inner dimension of the matrix product of one group."""
    few_in, few_out = c_in / groups, c_out / groups
    # Only a part of the filter reaches each strided input pixel, so there are as many products as forward.
    reached = few_out * volume * pixels_out / np.maximum(pixels_in, 1)
    rows = np.select(
        [direction == FORWARD, direction == INPUT_GRADIENT], [batch * pixels_out, batch * pixels_in], few_out
    )
    columns = np.select([direction == FORWARD, direction == INPUT_GRADIENT], [few_out, few_in], few_in * volume)
    inner = np.select(
        [direction == FORWARD, direction == INPUT_GRADIENT], [few_in * volume, reached], batch * pixels_out
    )
    return rows, columns, np.maximum(inner, 1)


class FittedConvolution:
    """A fitted model for a GPU. Structure and correction are combined once, at the knots."""

    def __init__(self, stored: ConvolutionModel | dict[str, Any], gpu: Gpu, dtype: str) -> None:
        self.model = stored if isinstance(stored, ConvolutionModel) else ConvolutionModel.model_validate(stored)
        self.dtype = dtype
        self.known = correction = Lattice.load(self.model.correction)
        knots = knot_sizes(correction.axes)
        self.surface = Surface.of(multiplied(self.model.structure, gpu, dtype, *knots), correction)
        self._floor = self.model.structure.floor_us * 1e-6
        self._bandwidth = gpu.memory_bandwidth_bytes_per_s
        self._bytes_per_s = self._bandwidth * self.model.structure.memory_share

    def seconds(self, those: Columns) -> tuple[np.ndarray, np.ndarray]:
        """Returns seconds, and whether measurements surround the shapes."""
        shape = [
            np.maximum(size, 1)
            for size in (those.batch, those.channels_in, those.channels_out, those.groups, those.pixels_in, those.pixels_out, those.volume)
        ]  # fmt: skip
        _, c_in, _, groups, _, _, volume = shape
        rows, columns, inner = as_product(those.direction, *shape)
        moved = traffic(self.dtype, *shape)
        place = (groups * rows, columns, inner)
        seconds, inside = self.surface(*place), self.known(*place)[1]
        seconds = np.where((volume == WINOGRAD_FILTER) & (those.stride == 1), seconds * self.model.winograd, seconds)
        seconds = np.maximum(seconds, moved / self._bytes_per_s + self._floor)
        depthwise = (groups > 1) & (groups == c_in)
        seconds = np.where(depthwise, moved / (self._bandwidth * DEPTHWISE_SHARE) + self._floor, seconds)
        empty = those.batch * those.channels_in * those.channels_out * those.pixels_out <= 0
        return np.where(empty, 0.0, seconds), inside & (groups == 1)


def multiplied(
    structure: GemmStructure, gpu: Gpu, dtype: str, rows: np.ndarray, columns: np.ndarray, inner: np.ndarray
) -> np.ndarray:
    """The structural time of the product alone, without memory traffic."""
    return structure.seconds(gpu, dtype, np.ones_like(rows), rows, columns, inner, np.zeros_like(rows))


def traffic(
    dtype: str, batch: np.ndarray, c_in: np.ndarray, c_out: np.ndarray, groups: np.ndarray, pixels_in: np.ndarray,
    pixels_out: np.ndarray, volume: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """The bytes of input images, output images and filters; one of them is the result."""
    answer: np.ndarray = RATE_BYTES[dtype] * (
        batch * (c_in * pixels_in + c_out * pixels_out) + c_in / groups * c_out * volume
    )
    return answer


class Convolutions(Family[kernel.Convolution]):
    name, title, compute_bound = "convolution", "convolution", True

    def predict(self, kernels: Sequence[kernel.Convolution]) -> Durations:
        return by_model(kernels, self._of_dtype)

    def _of_dtype(self, dtype: str, kernels: list[kernel.Convolution]) -> Durations:
        parts = []
        for direction in range(len(DIRECTIONS)):
            places = [place for place, each in enumerate(kernels) if each.direction == direction]
            if places:
                parts.append((places, self._one_way(dtype, direction, Columns(kernels[place] for place in places))))
        return in_order(parts)

    def _one_way(self, dtype: str, direction: int, those: Columns) -> Durations:
        known_as = "float16" if dtype in ("bfloat16", "float16") else "float32"
        name = DIRECTIONS[direction]
        found = self.target.find("convolution", (f"{known_as} {name}", f"{known_as} forward"))
        if found is None:
            flops = 2 * those.batch * those.channels_in * those.channels_out * those.pixels_out * those.volume
            return self.target.bound(dtype, flops)
        profile, model = found
        rate = dtype if dtype in self.gpu.peak_flops else known_as
        convolution = self.target.fitted(profile, model, rate, partial(FittedConvolution, gpu=self.gpu, dtype=rate))
        seconds, inside = convolution.seconds(those)
        return known(seconds, inside & (model == f"{dtype} {name}"), profile)
