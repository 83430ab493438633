"""Fits `attention_time` to measured forward and backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from scipy.optimize import least_squares

from maya_core.hardware.catalog import Gpu
from maya_core.predictor.attention_time import (
    BACKWARD_MULTIPLICATIONS,
    AttentionModel,
    AttentionStructure,
    FittedAttention,
    points,
)
from maya_core.predictor.fitting.lattice_fit import fit_smooth, fit_surface
from maya_core.predictor.lattice import Axis, Lattice

Sizes = Sequence[np.ndarray]  # batch, heads, kv_heads, queries, keys, head, value_head, causal, window
START = AttentionStructure(efficiency=0.5, head_exponent=0.3, block_us=1.0, tile_us=0.2, floor_us=4.0, memory_share=0.7)
FIELDS = tuple(AttentionStructure.model_fields)
SHARES = ("efficiency", "memory_share")
GRID = (
    Axis(5, 14, 2),
    Axis(0, 12),
    Axis(5, 9),
    Axis(0, 12),
)  # queries, batch x heads, head dimension, batch x key heads
STAY = 0.3
SAMPLE = 4000  # rows to which the structure is fitted
STAY_BACKWARD = 0.05
BACKWARD_PASSES = (
    2.5  # reads gradients of outputs and writes those of queries, keys and values, in addition to the forward's tensors
)


def _pack(structure: AttentionStructure) -> np.ndarray:
    values = [getattr(structure, name) for name in FIELDS]
    return np.array([np.log(v / (1 - v)) if name in SHARES else np.log(v) for name, v in zip(FIELDS, values, strict=True)])  # fmt: skip


def _unpack(vector: np.ndarray) -> AttentionStructure:
    values = [1 / (1 + np.exp(-v)) if name in SHARES else np.exp(v) for name, v in zip(FIELDS, vector, strict=True)]
    return AttentionStructure(**dict(zip(FIELDS, (float(v) for v in values), strict=True)))


def fit_attention(
    gpu: Gpu, sizes: Sizes, seconds: np.ndarray, *, multiplications: float = 1.0, passes: float = 1.0,
    smoothness: float = 0.05,
) -> AttentionModel:  # fmt: skip
    start = _pack(START)
    sample = np.random.default_rng(0).permutation(len(seconds))[:SAMPLE]
    measured, part = np.log(seconds[sample]), [size[sample] for size in sizes]

    def off(vector: np.ndarray) -> np.ndarray:
        predicted = np.log(_unpack(vector).seconds(gpu, *part, multiplications=multiplications, passes=passes))
        return np.concatenate([predicted - measured, STAY * (vector - start)])

    found = least_squares(off, start, bounds=(start - 5, start + 5), loss="soft_l1", f_scale=0.05, max_nfev=80)
    structure = _unpack(np.round(found.x, 3))
    place = points(*(sizes[i] for i in (0, 1, 2, 3, 5, 6)))
    axes = [_axis(each, least) for each, least in zip(place, GRID, strict=True)]
    model = AttentionModel(
        structure=structure, correction=_flat(axes).store(), multiplications=multiplications, passes=passes
    )
    residuals = np.log(seconds / predict(model, gpu, sizes))
    hidden = (sizes[8] > 0) & (sizes[8] < sizes[4])
    correction = fit_surface(
        axes, [each[~hidden] for each in place], residuals[~hidden], structure=partial(model.plain, gpu),
        smoothness=smoothness,
    )  # fmt: skip
    model = model.model_copy(update={"correction": correction.store()})
    if hidden.sum() > 100:
        left = np.log(seconds / predict(model, gpu, sizes))[hidden]
        windowed = fit_smooth(axes, [each[hidden] for each in place], left, smoothness=smoothness)
        model = model.model_copy(update={"windowed": windowed.store()})
    return model


def _flat(axes: Sequence[Axis]) -> Lattice:
    shape = tuple(axis.count for axis in axes)
    return Lattice(tuple(axes), np.zeros(shape), np.ones(shape, bool))


def _axis(sizes: np.ndarray, least: Axis) -> Axis:
    """An axis over the sizes, and at least over `least`; beyond the data the correction is constant."""
    low, high = np.floor(np.log2(sizes.min())), np.ceil(np.log2(sizes.max()))
    return Axis(float(min(low, least.low)), float(max(high, least.high)), least.per_octave)


def fit_backward(
    gpu: Gpu, forward: AttentionModel, sizes: Sizes, seconds: np.ndarray, with_forward: np.ndarray
) -> AttentionModel:
    """Fits the backward pass to the few rows that exist: the forward kernel's structure, fitted again near its own values.

    For rows `with_forward`, the seconds include both passes.
    """
    start = _pack(forward.structure)
    before = np.where(with_forward, predict(forward, gpu, sizes), 0.0)

    def off(vector: np.ndarray) -> np.ndarray:
        backward = _unpack(vector).seconds(
            gpu, *sizes, multiplications=BACKWARD_MULTIPLICATIONS, passes=BACKWARD_PASSES
        )
        return np.concatenate([np.log((before + backward) / seconds), STAY_BACKWARD * (vector - start)])

    found = least_squares(off, start, bounds=(start - 3, start + 3), loss="soft_l1", f_scale=0.05)
    flat = _flat(GRID)
    return AttentionModel(
        structure=_unpack(np.round(found.x, 3)), correction=flat.store(),
        multiplications=BACKWARD_MULTIPLICATIONS, passes=BACKWARD_PASSES,
    )  # fmt: skip


def fit_scale(gpu: Gpu, donor: AttentionModel, factor: float) -> AttentionModel:
    """A relative's model, scaled by a factor."""
    lattice = Lattice.load(donor.correction)
    scaled = Lattice(lattice.axes, lattice.values + round(float(np.log(factor)), 3), lattice.support)
    return donor.model_copy(update={"correction": scaled.store(), "windowed": None})


def predict(model: AttentionModel, gpu: Gpu, sizes: Sizes) -> np.ndarray:
    return FittedAttention(model, gpu).seconds(*sizes)[0]
