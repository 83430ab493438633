"""The stored traces give the stored predictions, so that a prediction changes only on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import golden
import pytest

WITHIN = 1e-3
STORED = golden.stored()


def test_all_that_is_recorded_has_figures() -> None:
    assert {program: sorted(gpus) for program, gpus in STORED.items()} == {
        program: sorted(gpus) for program, gpus in golden.recorded().items()
    }


@pytest.mark.parametrize("program", sorted(STORED))
def test_predictions_are_what_they_were(program: str) -> None:
    moved = [
        f"{program} on {gpu}: {change}"
        for gpu, before in STORED[program].items()
        for change in _moved(before, golden.figures_of(golden.read(program, gpu)))
    ]
    assert not moved, "\n".join(["", *moved, "If that is meant, `make golden` rewrites the figures."])


def _moved(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Figures that are not what they were. Numbers of bytes and launches are to be the same, times nearly."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        f"{name} {_told(old.get(name), new.get(name))}"
        for name in sorted({*old, *new})
        if not _same(old.get(name), new.get(name))
    ]


def _flat(figures: dict[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}, ")
        else:
            yield above + name, value


def _same(old: float | None, new: float | None) -> bool:
    return old == new or (isinstance(old, float) and new == pytest.approx(old, rel=WITHIN, abs=0))


def _told(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return f"is new: {new:g}" if old is None else f"is gone, was {old:g}"
    change = f" ({new / old - 1:+.2%})" if old else ""
    return f"moved from {old:.10g} to {new:.10g}{change}"
