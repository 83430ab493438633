"""Selects the rows that are held out from a fit, and computes the errors on them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from maya_core.predictor.profile import HeldOut


def by_key(*columns: np.ndarray, share: float = 0.2, seed: str = "") -> np.ndarray:
    """True for the rows of a fifth of the distinct keys: all rows of a key are held out, or none."""
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    drawn = {
        key: int.from_bytes(hashlib.sha256(f"{seed}{key}".encode()).digest()[:8], "big") / 2**64 < share
        for key in set(keys)
    }
    return np.array([drawn[key] for key in keys], bool)


def largest_tenth(size: np.ndarray) -> np.ndarray:
    """True for the rows with the largest tenth of sizes."""
    answer: np.ndarray = size >= np.quantile(size, 0.9)
    return answer


def errors(measured: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    answer: np.ndarray = np.abs(predicted / measured - 1) * 100
    return answer


def held_out(split: str, measured: np.ndarray, predicted: np.ndarray) -> HeldOut:
    off = errors(measured, predicted)
    return HeldOut(
        split=split,
        rows=len(off),
        median_pct=round(float(np.median(off)), 2),
        p90_pct=round(float(np.percentile(off, 90)), 2),
    )


@dataclass(frozen=True)
class Line:
    """Predictions of held-out rows, with the measured times and the bound from the data sheet."""

    family: str
    split: str  # what the fit did not see
    gpu: str
    model: str  # dtype, or kernel
    measured: np.ndarray
    predicted: np.ndarray
    roofline: np.ndarray
    flops: np.ndarray | None = None
    moved: np.ndarray | None = None  # bytes


def summarize(lines: list[Line]) -> dict[str, list[HeldOut]]:
    """Held-out errors by model; the folds of a split are combined."""
    found: dict[str, list[HeldOut]] = {}
    for model, split in dict.fromkeys((line.model, line.split) for line in lines):
        those = [line for line in lines if (line.model, line.split) == (model, split)]
        measured, predicted = (
            np.concatenate([getattr(line, side) for line in those]) for side in ("measured", "predicted")
        )
        found.setdefault(model, []).append(held_out(split, measured, predicted))
    return found
