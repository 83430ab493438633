"""Arithmetic of recipes."""

from __future__ import annotations

from typing import Any

import pytest

from maya_core.search.expression import Expression

VALUES = {"gpus": 64, "tp": 8, "pp": 2, "name": "full", "on": True}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpus // (tp * pp)", 4),
        ("gpus % (tp * pp) == 0", True),
        ("1 < pp <= 2", True),
        ("name in ('full', 'none')", True),
        ("not on or tp > 8", False),
        ("'--sp' if tp > 1 else ''", "--sp"),
        ("max(tp, pp, 3) + ceil(7 / 2) - min(1, 2)", 11),
        ("-tp + 2 ** 3", 0),
        ("pp and name", "full"),
    ],
)
def test_values(text: str, expected: Any) -> None:
    assert Expression(text)(VALUES) == expected


def test_names() -> None:
    assert Expression("max(a, b) + c if d else 1").names == {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "tp.bit_length()",
        "[x for x in (1, 2)]",
        "tp[0]",
        "lambda: 1",
        "min(1, key=2)",
        "f'{tp}'",
        "tp +",
        "tp is pp",
        "(y := 2)",
    ],
)
def test_nothing_else_is_understood(text: str) -> None:
    with pytest.raises(ValueError, match=r"supported|called|not an expression"):
        Expression(text)


def test_what_cannot_be_computed_is_said() -> None:
    with pytest.raises(ValueError, match="divides by zero"):
        Expression("gpus // (tp - 8)")(VALUES)
    with pytest.raises(ValueError, match="unsupported operand"):
        Expression("tp - name")(VALUES)
