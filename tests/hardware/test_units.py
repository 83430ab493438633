"""Sizes, rates and times as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from maya_core.hardware.units import Flops, Rate, Seconds, Size

size, rate, flops, seconds = (TypeAdapter(kind) for kind in (Size, Rate, Flops, Seconds))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("512MiB", 2**29),
        ("1.5TiB", 3 * 2**39),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_sizes(text: object, value: int) -> None:
    assert size.validate_python(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3.35TB/s", 3.35e12),
        ("400Gb/s", 50e9),
        ("400 Gbps", 50e9),
        ("400Gbit/s", 50e9),
        ("900GB/s", 900e9),
        ("1GiB/s", 2**30),
        ("3.35e12", 3.35e12),
        (3.35e12, 3.35e12),
    ],
)
def test_rates(text: object, value: float) -> None:
    assert rate.validate_python(text) == pytest.approx(value)


def test_operations_and_times() -> None:
    assert flops.validate_python("989.4TFLOP/s") == pytest.approx(989.4e12)
    assert flops.validate_python("2.25PFLOPS") == pytest.approx(2.25e15)
    assert seconds.validate_python("5us") == pytest.approx(5e-6)
    assert seconds.validate_python("0.1ms") == pytest.approx(1e-4)


@pytest.mark.parametrize("text", ["80GB/s", "80Gb", "eighty GiB", "GiB", "-80GiB", "80 GiB GiB", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="must be a size: a number of bytes, or like '80GiB' or '80GB'"):
        size.validate_python(text)


def test_a_size_is_no_rate() -> None:
    with pytest.raises(ValidationError, match=r"must be a rate: .* or like '3.35TB/s' or '400Gb/s'"):
        rate.validate_python("80GiB")


@given(
    st.integers(1, 10**6),
    st.sampled_from([("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("kB", 10**3), ("TB", 10**12)]),
)
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert size.validate_python(f"{number}{unit[0]}") == number * unit[1]


@given(st.floats(0.001, 1e6))
def test_bits_are_an_eighth_of_bytes(number: float) -> None:
    assert rate.validate_python(f"{number!r}Gb/s") * 8 == pytest.approx(rate.validate_python(f"{number!r}GB/s"))


@given(st.text(max_size=12))
def test_no_text_breaks_the_reader(text: str) -> None:
    with contextlib.suppress(ValidationError):
        assert rate.validate_python(text) > 0
