"""Fits `gemm_time` to measured matrix multiplications: first the structure by robust least squares, then the correction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from maya_core.hardware.catalog import Gpu
from maya_core.predictor.fitting.lattice_fit import fit_lattice
from maya_core.predictor.gemm_time import (
    LAYOUTS,
    TILES,
    FittedGemm,
    GemmModel,
    GemmStructure,
    Sustained,
)
from maya_core.predictor.lattice import Axis, Lattice

SAMPLE = 2500  # rows to which the structure, which has few parameters, is fitted
ONE = Axis(0, 0)
KERNEL_FLOOR_US = 2.5  # of a small matrix multiplication, without the host

# The starting values of the structure, near which it stays where the data do not decide.
START = GemmStructure(
    tile_efficiency=[0.45, 0.55, 0.55, 0.65, 0.7, 0.7, 0.75, 0.75],
    tile_us=0.5, wave_us=0.5, floor_us=2.2, memory_share=0.8, l2_share=3.0, split_share=0.5,
    wave_quantization=0.7, tile_quantization=0.5,
)  # fmt: skip
SHARES = ("memory_share", "wave_quantization", "tile_quantization")  # between 0 and 1
POSITIVE = ("tile_us", "wave_us", "floor_us", "l2_share", "split_share")
STAY = 0.3  # the weight of the starting values


@dataclass(frozen=True)
class GemmRows:
    """Measured multiplications."""

    batch: np.ndarray
    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    seconds: np.ndarray
    layout: np.ndarray | None = None  # index into LAYOUTS
    group: np.ndarray | None = None  # the model from which a shape comes, if the source says it

    @property
    def sizes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.batch, self.m, self.n, self.k

    def __getitem__(self, mask: np.ndarray) -> GemmRows:
        layout = None if self.layout is None else self.layout[mask]
        group = None if self.group is None else self.group[mask]
        batch, m, n, k = (size[mask] for size in self.sizes)
        return GemmRows(batch, m, n, k, self.seconds[mask], layout, group)

    def __len__(self) -> int:
        return len(self.seconds)


def _logit(share: np.ndarray | float) -> np.ndarray:
    answer: np.ndarray = np.log(share) - np.log1p(-np.asarray(share))
    return answer


def _pack(structure: GemmStructure) -> np.ndarray:
    return np.concatenate([
        _logit(np.array(structure.tile_efficiency)),
        [float(_logit(getattr(structure, name))) for name in SHARES],
        [np.log(getattr(structure, name)) for name in POSITIVE],
    ])  # fmt: skip


def _unpack(vector: np.ndarray) -> GemmStructure:
    shares = 1 / (1 + np.exp(-vector[: len(TILES) + len(SHARES)]))
    positive = np.exp(vector[len(TILES) + len(SHARES) :])
    return GemmStructure(
        tile_efficiency=shares[: len(TILES)].tolist(),
        **dict(zip(SHARES, shares[len(TILES) :].tolist(), strict=True)),
        **dict(zip(POSITIVE, positive.tolist(), strict=True)),
    )


def fit_structure(gpu: Gpu, dtype: str, rows: GemmRows, moved: np.ndarray | None = None) -> GemmStructure:
    """Fits the structure to these rows. `moved` is their traffic in bytes, if it is not that of three matrices."""
    start = _pack(START)
    sample = rows
    if len(rows) > SAMPLE:
        chosen = np.random.default_rng(0).choice(len(rows), SAMPLE, replace=False)
        sample, moved = rows[chosen], None if moved is None else moved[chosen]
    measured = np.log(sample.seconds)

    def off(vector: np.ndarray) -> np.ndarray:
        predicted = np.log(_unpack(vector).seconds(gpu, dtype, *sample.sizes, moved))
        return np.concatenate([predicted - measured, STAY * (vector - start)])

    low, high = start - 6, start + 6
    found = least_squares(off, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, max_nfev=60)
    return _unpack(np.round(found.x, 3))


def _axis(sizes: np.ndarray, per_octave: int) -> Axis:
    low, high = np.floor(np.log2(sizes.min())), np.ceil(np.log2(sizes.max()))
    return Axis(float(low), float(max(high, low + 1)), per_octave)


def axes_for(rows: GemmRows, per_octave: int) -> list[Axis]:
    batch = ONE if rows.batch.max() == 1 else _axis(rows.batch, 1)
    return [batch, *(_axis(size, per_octave) for size in (rows.m, rows.n, rows.k))]


def fit_gemm(
    gpu: Gpu, dtype: str, rows: GemmRows, *, per_octave: int = 2, smoothness: float = 0.1, bare: bool = True
) -> tuple[GemmModel, float]:
    """Returns the model of these multiplications, and the seconds that timing added to each.

    `bare` rows were timed on the device only. For other rows, the floor beyond that of a kernel is attributed to the timer.
    """
    structure = fit_structure(gpu, dtype, rows)
    timer = 0.0 if bare else max(0.0, structure.floor_us - KERNEL_FLOOR_US) * 1e-6
    structure = structure.model_copy(update={"floor_us": structure.floor_us - timer * 1e6})
    seconds = np.maximum(rows.seconds - timer, 0.1 * rows.seconds)

    def structural(*sizes: np.ndarray) -> np.ndarray:
        return structure.seconds(gpu, dtype, *sizes)

    correction = fit_lattice(
        axes_for(rows, per_octave),
        rows.sizes,
        np.log(seconds / structural(*rows.sizes)),
        structure=structural,
        clamped=True,
        smoothness=smoothness,
        weights=(seconds / rows.seconds)
        ** 2,  # without the timer, little remains of a short row, so it has little weight
    )
    return GemmModel(structure=structure, correction=correction.store()), timer


def fit_scale(gpu: Gpu, dtype: str, donor: GemmModel, rows: GemmRows) -> tuple[GemmModel, float]:
    """A relative's structure, scaled to a few rows of this GPU, which are too few for a model of their own."""
    predicted, _ = FittedGemm(donor, gpu, dtype, corrected=False).seconds(*rows.sizes)

    def off(vector: np.ndarray) -> np.ndarray:
        answer: np.ndarray = np.log(predicted * np.exp(vector[0]) + np.exp(vector[1])) - np.log(rows.seconds)
        return answer

    found = least_squares(off, [0.0, np.log(5e-6)], loss="soft_l1", f_scale=0.05, bounds=([-2, -14], [2, -9])).x
    lattice = Lattice.load(donor.correction)
    scaled = Lattice(lattice.axes, np.full(lattice.shape, round(float(found[0]), 3)), lattice.support)
    return donor.model_copy(update={"correction": scaled.store()}), float(np.exp(found[1]))


def fit_sustained(gpu: Gpu, dtype: str, model: GemmModel, rows: GemmRows, *, smoothness: float = 0.3) -> GemmModel:
    """Adds to the model what sustained rows show: a coarse correction, and a factor by layout."""
    burst = FittedGemm(model, gpu, dtype, burst=True)

    def structural(*sizes: np.ndarray) -> np.ndarray:
        return burst.corrected(*(np.maximum(size, low) for size, low in zip(sizes, burst.least, strict=True)))[0]

    residual = np.log(rows.seconds / structural(*rows.sizes))
    layouts = {name: 1.0 for name in LAYOUTS}
    if (
        rows.layout is not None
    ):  # bursts are TN; the factors of other layouts come from their difference at similar sizes
        for code, name in enumerate(LAYOUTS):
            those = rows.layout == code
            if code and those.sum() >= 10:
                layouts[name] = round(
                    float(np.exp(np.median(residual[those]) - np.median(residual[rows.layout == 0]))), 4
                )
        residual = residual - np.log([layouts[LAYOUTS[code]] for code in rows.layout])
    lattice = fit_lattice(axes_for(rows, 1), rows.sizes, residual, structure=structural, smoothness=smoothness)
    return model.model_copy(update={"sustained": Sustained(correction=lattice.store(), layouts=layouts)})
