"""From measurements to factors on Maya's own predictions, checked on shapes that were left out."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence

import numpy as np

from maya_core.hardware.catalog import find_gpu
from maya_core.ops.kernel import Kernel
from maya_core.predictor.calibration import (
    STEEPEST,
    Calibration,
    Collective,
    Factor,
    FitCheck,
    Measured,
    Origin,
    Unused,
    shipped_digest,
)

Predict = Callable[[str, Sequence[Kernel]], np.ndarray]  # seconds of kernels on the GPU of that name

EACH = 5  # every fifth distinct shape is left out of everything but the report, and says what the factor is worth
FOLDS = 4  # of the others, by which a factor is accepted or not
ENOUGH = 8  # distinct shapes that a factor needs: of fewer the median is too much a matter of chance
WIDE = math.log(4)  # range of predicted times from which short and long ones may differ
SPREAD_LIMIT = 0.5  # natural logarithm: two of three shapes within 65 % of the factor
TOO_FEW = "too few shapes"
WORTH_IT = 0.8  # a factor must take away a fifth of the error, on shapes it was not made from
LARGEST = 10.0  # further off, the measurements are of something else


def shipped_seconds(gpu: str, kernels: Sequence[Kernel]) -> np.ndarray:
    """What Maya predicts without any calibration."""
    from maya_core.predictor.pricing import Predictor

    return Predictor(find_gpu(gpu)).kernels(list(kernels)).seconds


def make(
    name: str,
    gpu: str,
    sources: list[Origin],
    measured: list[Measured],
    collectives: list[Collective],
    *,
    predict: Predict = shipped_seconds,
    created: datetime.datetime | None = None,
) -> Calibration:
    """A calibration of these measurements."""
    made = Calibration(
        name=name,
        gpu=gpu,
        created=created or datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0),
        shipped=shipped_digest(),
        sources=sources,
        measured=sorted(measured, key=lambda row: (row.family, row.model, row.sizes)),
        collectives=sorted(
            collectives, key=lambda row: (row.op, row.nodes, row.ranks_per_node, row.network, row.bytes)
        ),
    )
    return refit(made, predict)


def refit(calibration: Calibration, predict: Predict = shipped_seconds) -> Calibration:
    """The same measurements against the predictions of this version of Maya."""
    rows = calibration.measured
    predicted = predict(calibration.gpu, [row.kernel for row in rows]) if rows else np.zeros(0)
    groups: dict[tuple[str, str], list[int]] = {}
    for place, row in enumerate(rows):
        if predicted[place] > 0:
            groups.setdefault((row.family, row.model), []).append(place)
    factors: list[Factor] = []
    unused: list[Unused] = []
    checks: list[FitCheck] = []
    for (family, model), places in sorted(groups.items()):
        found, check, reason = fit([rows[place] for place in places], predicted[places])
        if found is not None:
            factors.append(found)
        else:
            unused.append(Unused(family=family, model=model, rows=len(places), reason=reason))
        if check is not None:
            checks.append(check)
    changed = {"factors": factors, "unused": unused, "checks": checks, "shipped": shipped_digest()}
    return Calibration.model_validate(calibration.model_dump() | changed)


def merge(
    older: Calibration,
    sources: list[Origin],
    measured: list[Measured],
    collectives: list[Collective],
    *,
    predict: Predict = shipped_seconds,
) -> Calibration:
    """A calibration with more measurements; of what was measured twice the newer counts."""
    rows = {row.kernel: row for row in [*older.measured, *measured]}

    def call(row: Collective) -> tuple[object, ...]:
        return row.op, row.bytes, row.ranks_per_node, row.nodes, row.network

    calls = {call(row): row for row in [*older.collectives, *collectives]}
    every = [*older.sources, *(source for source in sources if source not in older.sources)]
    return make(older.name, older.gpu, every, list(rows.values()), list(calls.values()), predict=predict)


def fit(rows: Sequence[Measured], predicted: np.ndarray) -> tuple[Factor | None, FitCheck | None, str]:
    """The factor of one family and model, what it is worth on shapes left out, and why there is none if there is none."""
    order = np.argsort(predicted, kind="stable")
    measured = np.array([rows[place].seconds for place in order])
    sizes = np.array([rows[place].sizes for place in order], float)
    predicted = predicted[order]
    held_out = np.arange(len(order)) % EACH == EACH - 1
    used = ~held_out
    factor, reason = _factor(rows[0], sizes[used], predicted[used], measured[used])
    if not held_out.any():
        return factor, None, reason
    before = predicted[held_out] / measured[held_out]
    after = before * factor.at(predicted[held_out]) if factor is not None else before
    check = FitCheck(
        family=rows[0].family,
        model=rows[0].model,
        rows=int(held_out.sum()),
        before_pct=_percent(before),
        after_pct=_percent(after),
    )
    return factor, check, reason


def _percent(ratio: np.ndarray) -> float:
    return round(100 * float(np.median(np.abs(ratio - 1))), 1)


def _factor(one: Measured, sizes: np.ndarray, predicted: np.ndarray, measured: np.ndarray) -> tuple[Factor | None, str]:
    if len(predicted) < ENOUGH:
        return None, TOO_FEW
    place, ratio = np.log(predicted), np.log(measured / predicted)
    slope, start, spread = _line(place, ratio)
    short, long = (math.exp(start + slope * float(end)) for end in (place.min(), place.max()))
    if not all(1 / LARGEST <= each <= LARGEST for each in (short, long)):
        return None, f"{math.exp(np.median(ratio)):.3g} times the prediction: this cannot be the same work"
    if spread > SPREAD_LIMIT:
        return None, f"shapes disagree by {100 * math.expm1(spread):.0f} %"
    before, after = _percent(np.exp(-ratio)), _percent(np.exp(_foreseen(place, ratio) - ratio))
    if after > before * WORTH_IT:
        return None, f"it would not help ({after:.0f} % off instead of {before:.0f} %)"
    factor = Factor(
        family=one.family,
        model=one.model,
        rows=len(predicted),
        short=_rounded(short),
        long=_rounded(long),
        short_s=float(predicted.min()),
        long_s=float(predicted.max()),
        spread=_rounded(math.expm1(spread)),
        smallest=tuple(sizes.min(axis=0).tolist()),
        largest=tuple(sizes.max(axis=0).tolist()),
    )
    return factor, ""


def _foreseen(place: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """The factor's logarithm at each place as the others tell it."""
    told = np.zeros(len(place))
    fold = np.arange(len(place)) % FOLDS
    for each in range(FOLDS):
        slope, start, _ = _line(place[fold != each], ratio[fold != each])
        told[fold == each] = start + slope * place[fold == each]
    return told


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _line(place: np.ndarray, ratio: np.ndarray) -> tuple[float, float, float]:
    """Slope and start of the factor's logarithm, and the spread around it: level, unless a slope explains a fifth of it."""
    level = float(np.median(ratio))
    flat = _deviation(ratio - level)
    if len(place) < ENOUGH or np.ptp(place) < WIDE:
        return 0.0, level, flat
    slope = float(np.clip(_theil_sen(place, ratio), -STEEPEST, STEEPEST))
    start = float(np.median(ratio - slope * place))
    sloped = _deviation(ratio - slope * place - start)
    return (slope, start, sloped) if sloped <= 0.8 * flat else (0.0, level, flat)


def _deviation(residual: np.ndarray) -> float:
    return 1.4826 * float(np.median(np.abs(residual)))


def _theil_sen(place: np.ndarray, ratio: np.ndarray) -> float:
    """The median slope between pairs a factor of two or more apart; of many rows, of every so many."""
    if len(place) > 400:
        chosen = np.linspace(0, len(place) - 1, 400).astype(int)
        place, ratio = place[chosen], ratio[chosen]
    first, second = np.triu_indices(len(place), 1)
    apart = np.abs(place[second] - place[first]) >= math.log(2)
    if not apart.any():
        return 0.0
    return float(np.median((ratio[second] - ratio[first])[apart] / (place[second] - place[first])[apart]))
