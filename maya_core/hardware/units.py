"""Reads quantities as people write them ("80GiB", "400Gb/s", "5us") and turns them into plain numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, NonNegativeFloat, PositiveFloat, PositiveInt

_DECIMAL = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_RATES = {f"{size}/s": factor for size, factor in _SIZES.items()} | {
    f"{prefix}{bit}": factor / 8 for prefix, factor in _DECIMAL.items() for bit in ("b/s", "bit/s", "bps")
}
_FLOPS = {f"{prefix}{unit}": factor for prefix, factor in _DECIMAL.items() for unit in ("FLOP/s", "FLOPS", "OP/s")}
_SECONDS = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATIONS = _SECONDS | {"min": 60, "h": 3600, "d": 86400}
_COUNTS = _DECIMAL | {"B": 1e9}  # a billion tokens is written both ways
_SHARES = {"": 1.0, "%": 0.01}


def _reader(units: dict[str, float], expected: str) -> Callable[[object], object]:
    """A validator that turns a string with one of the units into a number, and leaves anything else to pydantic."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*", value)
        if not found or (found[2] and found[2] not in units):
            raise ValueError(f"must be {expected}")
        number = float(found[1].replace("_", "")) * units.get(found[2], 1)
        return int(number) if number == int(number) else number

    return read


def _whole(value: object) -> object:
    """Drops the fraction of a byte, because a size ("79.18GiB") is a whole number of bytes."""
    return int(value) if isinstance(value, float) else value


read_size = _reader(_SIZES, "a size: a number of bytes, or like '80GiB' or '80GB'")
read_rate = _reader(_RATES, "a rate: a number of bytes per second, or like '3.35TB/s' or '400Gb/s'")

Size = Annotated[PositiveInt, BeforeValidator(_whole), BeforeValidator(read_size)]
Rate = Annotated[PositiveFloat, BeforeValidator(read_rate)]
RateOrNone = Annotated[NonNegativeFloat, BeforeValidator(read_rate)]  # 0: there is no such link
Flops = Annotated[
    PositiveFloat,
    BeforeValidator(_reader(_FLOPS, "a number of operations per second, or like '989TFLOP/s'")),
]
Seconds = Annotated[
    NonNegativeFloat, BeforeValidator(_reader(_SECONDS, "a time: a number of seconds, or like '5us' or '0.1ms'"))
]
_SHARE = _reader(_SHARES, "a share, like '3%' or 0.03")
read_duration = _reader(_DURATIONS, "a time: a number of seconds, or like '72h', '3d' or '30min'")
read_count = _reader(_COUNTS, "a number, or like '200k', '1.5M' or '1e12'")


def read_share(value: object) -> object:
    """Reads a share. A plain number from 1 on is rejected, because it is most likely meant as a percentage."""
    share = _SHARE(value)
    if isinstance(share, int | float) and share >= 1 and not (isinstance(value, str) and "%" in value):
        raise ValueError(f"must be a share, like '3%' or 0.03; {value} would be {share:.0%}")
    return share


Share = Annotated[NonNegativeFloat, BeforeValidator(read_share)]
