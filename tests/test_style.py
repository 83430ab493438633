"""Rules of the code that no linter checks: short functions, modules that say what they are for, one name for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "maya_core").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])
MOST_LINES = 60
# Words of ours that nobody else uses, and the field's word for each.
HOME_MADE = {
    r"\bput_on\b": "install",
    r"device/face|\bface\.py\b": "shim",
    r"\bGround\b|\bground\.py\b": "fork server",
    r"left_out\.py|\bleft_out\b": "skipped",
    r"\bgo(es|ne)? on with\b": "continue, resume",
}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path, ast.parse(path.read_text())


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MOST_LINES
    ]
    assert not long


def test_modules_say_what_they_are_for() -> None:
    silent = [str(path.relative_to(ROOT)) for path, tree in trees() if tree.body and ast.get_docstring(tree) is None]
    assert not silent


def test_no_two_classes_of_the_core_share_a_name() -> None:
    places = defaultdict(list)
    for path, tree in trees():
        if path.is_relative_to(ROOT / "maya_core"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize("pattern", HOME_MADE)
def test_the_fields_usual_words(pattern: str) -> None:
    found = [str(path.relative_to(ROOT)) for path in SOURCES if re.search(pattern, path.read_text())]
    assert not found, f"write: {HOME_MADE[pattern]}"
