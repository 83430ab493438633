"""Fits a lattice to what structure does not explain. It is smooth, and doubling a size never makes work faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import isotonic_regression
from scipy.sparse.linalg import cg

from maya_core.predictor.lattice import Axis, Lattice, Surface, corners, knot_sizes

ROBUST = 0.02  # larger residuals count linearly, not squared
ROUNDS = 5
MARGIN = 1e-3  # values are stored in thousandths


def fit_lattice(
    axes: Sequence[Axis],
    sizes: Sequence[np.ndarray],
    residuals: np.ndarray,
    *,
    structure: Callable[..., np.ndarray],
    smoothness: float = 0.05,
    shrinkage: float = 0.003,
    weights: np.ndarray | None = None,
    clamped: bool = False,
) -> Lattice:
    """The correction that explains `residuals`, log(measured / structural), at the measured `sizes`.

    `structure(*sizes)` is the structural time. The correction never falls by more than the structure grows from a size to its double.
    `clamped` says that the structure is constant below the grid, too.
    """
    values, trust = _solve(axes, sizes, residuals, smoothness, shrinkage, weights)
    falls = _allowed_falls(axes, structure, clamped)
    values = _project(values, trust + 1e-3, [axis.per_octave for axis in axes], falls)
    return Lattice(tuple(axes), values, trust > 0.25)


def fit_surface(
    axes: Sequence[Axis],
    sizes: Sequence[np.ndarray],
    residuals: np.ndarray,
    *,
    structure: Callable[..., np.ndarray],
    smoothness: float = 0.05,
    shrinkage: float = 0.003,
    weights: np.ndarray | None = None,
) -> Lattice:
    """The correction of structural time at the knots, for work that a `Surface` predicts between knots.

    The corrected time never falls from one knot to the next.
    """
    values, trust = _solve(axes, sizes, residuals, smoothness, shrinkage, weights)
    structural = np.log(structure(*knot_sizes(axes))).reshape(values.shape)
    falls = []
    for which in range(len(axes)):
        rise = np.zeros_like(values)
        before_last = tuple(slice(-1) if axis == which else slice(None) for axis in range(len(axes)))
        rise[before_last] = np.maximum(np.diff(structural, axis=which), 0)
        falls.append(rise)
    values = _project(values, trust + 1e-3, [1] * len(axes), falls)
    return Lattice(tuple(axes), values, trust > 0.25)


def fit_smooth(
    axes: Sequence[Axis], sizes: Sequence[np.ndarray], residuals: np.ndarray, *, smoothness: float = 0.05, shrinkage: float = 0.003
) -> Lattice:  # fmt: skip
    """A correction that only has to be smooth."""
    values, trust = _solve(axes, sizes, residuals, smoothness, shrinkage, None)
    return Lattice(tuple(axes), values, trust > 0.25)


def flat_surface(axes: Sequence[Axis], structure: Callable[..., np.ndarray]) -> Surface:
    """The structural time, interpolated between knots as a surface does it."""
    shape = tuple(axis.count for axis in axes)
    return Surface.of(structure(*knot_sizes(axes)), Lattice(tuple(axes), np.zeros(shape), np.ones(shape, bool)))


def _solve(
    axes: Sequence[Axis], sizes: Sequence[np.ndarray], residuals: np.ndarray, smoothness: float, shrinkage: float,
    weights: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Smooth values at the knots, by robust least squares, and the number of rows that support each."""
    shape = tuple(axis.count for axis in axes)
    found, _ = corners(axes, sizes)
    rows = np.arange(len(residuals))
    design = sum(
        sparse.csr_matrix((weight, (rows, index)), shape=(len(rows), int(np.prod(shape)))) for index, weight in found
    )
    given = np.ones(len(residuals)) if weights is None else np.asarray(weights, float)
    penalty = smoothness * _roughness(shape) + shrinkage * sparse.identity(design.shape[1])
    weight, values = given, np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        normal = (design.T @ sparse.diags_array(weight) @ design + penalty).tocsr()
        scale = sparse.diags_array(1 / normal.diagonal())
        values, _ = cg(normal, design.T @ (weight * residuals), x0=values, rtol=1e-5, maxiter=2000, M=scale)
        weight = given * ROBUST / np.maximum(np.abs(residuals - design @ values), ROBUST)
    trust = np.asarray((design.T @ sparse.diags_array(given)).sum(axis=1)).ravel().reshape(shape)
    return values.reshape(shape), trust


def _roughness(shape: tuple[int, ...]) -> sparse.sparray:
    """The sum of squared second differences along every axis, as a matrix."""
    total = sparse.csr_array((int(np.prod(shape)),) * 2)
    for which, length in enumerate(shape):
        if length < 3:
            continue
        second = sparse.diags_array([1.0, -2.0, 1.0], offsets=[0, 1, 2], shape=(length - 2, length))
        operator = sparse.csr_array(np.ones((1, 1)))
        for axis, size in enumerate(shape):
            operator = sparse.kron(operator, second if axis == which else sparse.identity(size))
        total = total + operator.T @ operator
    return total


STEPS = (
    0.03,
    0.5,
)  # samples after a knot, as fractions of the distance to the next; tiles are emptiest just after a knot
BEYOND = 2  # octaves sampled past the last knot


def _samples(axis: Axis, clamped: bool) -> np.ndarray:
    """The sizes (log2) at which the structure is evaluated: from one, sparsely below the first knot, to beyond the last."""
    below = np.arange(axis.low if clamped else min(0.0, axis.low), axis.low)
    within = np.arange(axis.low, axis.high + BEYOND, 1 / axis.per_octave)
    return (np.concatenate([below, within])[:, None] + np.array(STEPS) / axis.per_octave).ravel()


def _allowed_falls(axes: Sequence[Axis], structure: Callable[..., np.ndarray], clamped: bool) -> list[np.ndarray]:
    """By axis and knot: the least rise of the logarithm of structural time when that size doubles, near that knot.

    Sizes outside the grid count for the knot at its border.
    """
    samples = [_samples(axis, clamped) for axis in axes]
    grid = np.meshgrid(*(2**sample for sample in samples), indexing="ij")
    time = np.log(structure(*(sizes.ravel() for sizes in grid))).reshape(grid[0].shape)
    falls = []
    for which, sample in enumerate(samples):
        at = np.searchsorted(sample, sample + 1 - 1e-9)
        here = np.flatnonzero(at < len(sample))
        rise = np.maximum(np.take(time, at[here], which) - np.take(time, here, which), 0)
        for other, axis in enumerate(axes):
            positions = samples[other][here] if other == which else samples[other]
            place = np.clip((positions - axis.low) * axis.per_octave, 0, axis.count - 1)
            near = [np.flatnonzero(np.abs(place - knot) <= 1) for knot in range(axis.count)]
            rise = np.stack([np.take(rise, indices, other).min(axis=other) for indices in near], axis=other)
        falls.append(np.maximum(rise - MARGIN, 0))
    return falls


def _project(values: np.ndarray, trust: np.ndarray, octaves: list[int], falls: list[np.ndarray]) -> np.ndarray:
    """The nearest lattice, weighted by trust, whose values never fall over an octave by more than structure rises."""
    corrections = [np.zeros_like(values) for _ in octaves]
    for _ in range(40):
        before = values
        for which, (octave, fall) in enumerate(zip(octaves, falls, strict=True)):
            wanted = values + corrections[which]
            values = _project_axis(wanted, trust, which, octave, fall)
            corrections[which] = wanted - values
        if np.max(np.abs(values - before)) < 1e-3:
            break
    for _ in range(100):  # removes the remaining violations by raising values
        before = values
        for which, (octave, fall) in enumerate(zip(octaves, falls, strict=True)):
            values = _lift_axis(values, which, octave, fall)
        if np.array_equal(values, before):
            break
    return values


def _project_axis(values: np.ndarray, trust: np.ndarray, which: int, octave: int, fall: np.ndarray) -> np.ndarray:
    """Isotonic regression of every line along an axis, over knots an octave apart, after adding the allowed falls."""
    moved, allowed, weight = (np.moveaxis(array, which, 0) for array in (values.copy(), fall, trust))
    slack = np.zeros_like(allowed)
    for knot in range(octave, len(slack)):
        slack[knot] = slack[knot - octave] + allowed[knot - octave]
    flat, flat_slack, flat_weight = (array.reshape(len(moved), -1) for array in (moved, slack, weight))
    for start in range(octave):
        line = slice(start, None, octave)
        wanted = flat[line] + flat_slack[line]
        for column in np.flatnonzero((np.diff(wanted, axis=0) < 0).any(axis=0)):
            fitted = isotonic_regression(wanted[:, column], weights=np.ascontiguousarray(flat_weight[line, column])).x
            flat[line, column] = fitted - flat_slack[line, column]
    return np.moveaxis(flat.reshape(moved.shape), 0, which)


def _lift_axis(values: np.ndarray, which: int, octave: int, fall: np.ndarray) -> np.ndarray:
    """Raises values that are still too low. Outside the grid the border's value applies, so octaves that end there count, too."""
    moved, allowed = np.moveaxis(values, which, 0).copy(), np.moveaxis(fall, which, 0)
    last = len(moved) - 1
    pairs = [(max(knot - octave, 0), knot) for knot in range(1, last + 1)]
    pairs += [(knot, last) for knot in range(max(last - octave, 0), last)]
    for low, high in pairs:
        least = moved[low] - allowed[low]
        moved[high] = np.where(moved[high] < least - 1e-9, least, moved[high])
    return np.moveaxis(moved, 0, which)
