"""Writes numbers for people: with a unit and about three digits. All tables and pages use these functions."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePath

NOTHING = "\u2013"
STEP_PARTS = {  # where the time of a step goes, by the prediction's field
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "waiting_s": "waiting for other ranks",
    "copy_s": "copies",
    "host_s": "waiting for the host",
}


def seconds(value: float | None) -> str:
    """1.08 s, 37.2 ms, 812 µs"""
    if value is None:
        return NOTHING
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(value) * scale >= 0.9995:
            return f"{_digits(value * scale)} {unit}"
    return "0 s" if not value else f"{_digits(value * 1e9)} ns"


def size(value: float | None) -> str:
    if value is None:
        return NOTHING
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def count(value: float | None) -> str:
    """1.29 M, 48,210, 12.5"""
    if value is None:
        return NOTHING
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else _digits(value)


def flops(value: float) -> str:
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}FLOP"
    return f"{_digits(value / 1e6)} MFLOP"


def rate(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{_digits(value / 1e9)} GB/s" if value >= 1e9 else f"{_digits(value / 1e6)} MB/s"


def money(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value >= 0.1 or value <= 0:
        return f"${value:,.0f}" if value >= 1000 else f"${value:.2f}"
    return f"${value:.{1 - math.floor(math.log10(value))}f}"  # two significant digits


def energy(kwh: float) -> str:
    return f"{_digits(kwh)} kWh" if kwh >= 0.1 else f"{_digits(kwh * 1e3)} Wh"


def share(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{100 * value:.1f} %" if value < 0.9995 else "100 %"


def percent(value: float) -> str:
    """A share as a whole number of per cent: 17 %"""
    return f"{100 * value:.0f} %"


def line(source: str) -> str:
    """A line of the program with only the name of its file. The page shows the whole path in a tooltip."""
    return source.replace("\\", "/").rpartition("/")[2] or NOTHING


def short_source(source: str) -> str:
    """A line of the program with a short path: relative to this folder or to site-packages, otherwise the last parts."""
    if not source:
        return ""
    file, _, line = source.rpartition(":")
    if "/site-packages/" in file:
        return f"{file.rpartition('/site-packages/')[2]}:{line}"
    relative = os.path.relpath(file, Path.cwd())
    if relative.startswith(".."):
        relative = str(PurePath(*PurePath(file).parts[-3:]))
    return f"{relative}:{line}"


def _digits(value: float) -> str:
    """A number with about three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def moment(step: int | None, phase: str | None) -> str:
    """step 3, backward; validation, after step 3"""
    if phase == "validation":
        return f"validation, after step {step}"
    return f"step {step}, {phase}" if phase else f"step {step}"
