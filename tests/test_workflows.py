"""What can break silently in the workflows of GitHub: targets of the Makefile, and versions that differ from what the package declares."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from maya_core.hardware import toml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = toml.loads((ROOT / "pyproject.toml").read_text())["project"]


def workflow(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return content


def matrix(name: str, job: str, axis: str) -> list[str]:
    values: list[str] = workflow(name)["jobs"][job]["strategy"]["matrix"][axis]
    assert all(isinstance(value, str) for value in values), "without quotes, YAML reads 3.10 as 3.1"
    return values


def minor(version: str) -> tuple[int, int]:
    first, second = version.split(".")
    return int(first), int(second)


def test_every_make_target_exists() -> None:
    used = {
        word
        for path in WORKFLOWS
        for words in re.findall(r"\brun: make (.*)", path.read_text())
        for word in words.split()
        if re.fullmatch(r"[a-z-]+", word)
    }
    used |= set(re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    assert {"lint", "docs", "test-fast", "test-slow", "test-framework"} <= used
    assert used <= TARGETS, f"not in the Makefile: {', '.join(sorted(used - TARGETS))}"


def test_every_path_exists() -> None:
    paths = workflow("torch")[True]["pull_request"]["paths"]  # YAML reads the key `on` as True
    paths += re.findall(r"\b(?:tests|\.ci)/[\w/.]+", "".join(path.read_text() for path in WORKFLOWS))
    missing = [path for path in paths if not (ROOT / path.removesuffix("/**")).exists()]
    assert not missing


def test_python_versions_are_those_that_the_package_declares() -> None:
    tested = matrix("ci", "fast", "python")
    prefix = "Programming Language :: Python :: 3."
    declared = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert tested == declared
    assert PROJECT["requires-python"] == f">={tested[0]}"
    assert [minor(version) for version in tested] == [(3, number) for number in range(10, 10 + len(tested))]


def test_torch_versions_are_those_that_the_package_supports() -> None:
    seam = runpy.run_path(str(ROOT / "maya_core" / "torch_seam" / "version.py"))
    (major, first), (same, last) = seam["FIRST"], seam["LAST"]
    assert major == same
    assert [minor(version) for version in matrix("torch", "torch", "torch")] == [
        (major, number) for number in range(first, last + 1)
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_permissions_are_minimal_and_actions_are_pinned(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    assert content["concurrency"]
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        assert set(job.get("permissions", {})) <= {"id-token"}, f"{name} needs no more than trusted publishing"
        for step in job["steps"]:
            pinned = step.get("uses", "./")
            assert re.fullmatch(r"\./.*|[\w/-]+@(v\d+|release/v\d+|[0-9a-f]{40})", pinned), f"{name}: {pinned}"
