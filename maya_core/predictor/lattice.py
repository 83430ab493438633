"""A smooth correction on a grid of log2 sizes for what structure does not explain, fitted within the range of the data.

Between knots the correction is multilinear. Outside the grid it is constant, so structure alone decides how time grows there. The distance
between knots is a fixed fraction of an octave: doubling a size moves by whole cells, so the fit can bound how far the correction may fall
(`fitting/lattice_fit.py`).
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

SCALE = 1000  # corrections are stored in thousandths of a natural logarithm


@dataclass(frozen=True)
class Axis:
    """Knots over log2 of a size, from `low` to `high`, with `per_octave` knots in each octave."""

    low: float
    high: float
    per_octave: int = 1

    @property
    def count(self) -> int:
        return round((self.high - self.low) * self.per_octave) + 1

    @property
    def knots(self) -> np.ndarray:
        return self.low + np.arange(self.count) / self.per_octave

    def locate(self, size: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each size, its cell, its position in the cell (0 to 1), and whether it is within the axis."""
        place = (np.log2(np.maximum(size, 1e-9)) - self.low) * self.per_octave
        clipped = np.clip(place, 0, self.count - 1)
        cell = np.minimum(clipped.astype(np.int64), max(self.count - 2, 0))
        inside = (place >= -0.5) & (place <= self.count - 0.5)
        return cell, clipped - cell, inside


class StoredLattice(BaseModel):
    """A lattice in the form that profiles store."""

    model_config = ConfigDict(extra="forbid")

    axes: list[tuple[float, float, int]]
    values: str  # thousandths, last axis fastest: little-endian int16, deflated, base64
    support: str  # a bit for each knot, whether measurements are near: deflated, base64


@dataclass(frozen=True)
class Lattice:
    axes: tuple[Axis, ...]
    values: np.ndarray  # natural logarithm of measured / structural, one per knot
    support: np.ndarray  # bool, one per knot

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.count for axis in self.axes)

    def __call__(self, *sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the factor on the structural time at these sizes, and whether measurements surround them."""
        found, inside = corners(self.axes, sizes)
        values, support = self.values.ravel(), self.support.ravel()
        total = np.zeros(len(inside))
        backed = np.zeros(len(inside))
        for index, weight in found:
            total += weight * values[index]
            backed += weight * support[index]
        return np.exp(total), inside & (backed > 0.5)

    def times(self, factors: np.ndarray) -> Lattice:
        """This lattice with additional factors at its knots."""
        return Lattice(self.axes, self.values + np.log(factors).reshape(self.shape), self.support)

    def lifted(self, structural: np.ndarray) -> Lattice:
        """This lattice, raised where time would fall from a knot to the one an octave above, with this structural time at the knots.

        A fit ensures that for its own GPU; on a relative, structure rises at other places.
        """
        base = np.log(structural).reshape(self.shape)
        total = base + self.values
        for which, axis in enumerate(self.axes):
            moved = np.moveaxis(total, which, 0)
            for start in range(axis.per_octave):
                moved[start :: axis.per_octave] = np.maximum.accumulate(moved[start :: axis.per_octave], axis=0)
        return Lattice(self.axes, total - base, self.support)

    def store(self) -> StoredLattice:
        return StoredLattice(
            axes=[(axis.low, axis.high, axis.per_octave) for axis in self.axes],
            values=_packed(np.round(self.values.ravel() * SCALE).clip(-32767, 32767).astype("<i2").tobytes()),
            support=_packed(np.packbits(self.support.ravel()).tobytes()),
        )

    @staticmethod
    def load(stored: StoredLattice | dict[str, Any]) -> Lattice:
        if isinstance(stored, dict):
            stored = StoredLattice.model_validate(stored)
        axes = tuple(Axis(*axis) for axis in stored.axes)
        shape = tuple(axis.count for axis in axes)
        values = np.frombuffer(_unpacked(stored.values), "<i2").reshape(shape) / SCALE
        bits = np.unpackbits(np.frombuffer(_unpacked(stored.support), np.uint8), count=int(np.prod(shape)))
        return Lattice(axes, values, bits.astype(bool).reshape(shape))


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def corners(
    axes: Sequence[Axis], sizes: Sequence[np.ndarray]
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """(flat knot index, weight) for each corner of the points' cells, and whether the points are within the axes."""
    located = [axis.locate(np.atleast_1d(np.asarray(size, float))) for axis, size in zip(axes, sizes, strict=True)]
    inside = np.logical_and.reduce([place[2] for place in located])
    found = []
    for corner in itertools.product((0, 1), repeat=len(axes)):
        index = np.zeros(len(inside), np.int64)
        weight = np.ones(len(inside))
        for axis, (cell, fraction, _), upper in zip(axes, located, corner, strict=True):
            index = index * axis.count + np.minimum(cell + upper, axis.count - 1)
            weight = weight * (fraction if upper else 1 - fraction)
        found.append((index, weight))
    return found, inside


def knot_sizes(axes: Sequence[Axis]) -> list[np.ndarray]:
    """The sizes at every knot of a grid, with the last axis innermost."""
    return [sizes.ravel() for sizes in np.meshgrid(*(2**axis.knots for axis in axes), indexing="ij")]


@dataclass(frozen=True)
class Surface:
    """Time over a grid of log2 sizes. Its logarithm is multilinear, and it never falls.

    Below the grid it is constant; above the grid it grows with a power of each size, as work does.
    """

    axes: tuple[Axis, ...]
    values: np.ndarray  # natural logarithm of seconds
    growth: tuple[float, ...]  # beyond the last knot, by axis

    @staticmethod
    def of(structural: np.ndarray, correction: Lattice, growth: tuple[float, ...] | None = None) -> Surface:
        """The surface of structural seconds at the knots times their correction."""
        values = correction.values + np.log(structural).reshape(correction.shape)
        for axis in range(values.ndim):  # on another GPU than the one of the correction, it might fall
            values = np.maximum.accumulate(values, axis=axis)
        return Surface(correction.axes, values, growth or (1.0,) * values.ndim)

    def __call__(self, *sizes: np.ndarray) -> np.ndarray:
        """Seconds at these sizes."""
        values, total = self.values.ravel(), np.zeros(len(sizes[0]))
        for index, weight in corners(self.axes, sizes)[0]:
            total += weight * values[index]
        for axis, size, power in zip(self.axes, sizes, self.growth, strict=True):
            total += power * np.log(np.maximum(np.asarray(size, float) / 2**axis.high, 1))
        return np.exp(total)
