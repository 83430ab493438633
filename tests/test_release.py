"""The version, the changelog, the pins and the addresses of the project agree wherever they are written."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

import maya_core
from maya_core.hardware import toml

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
problems = runpy.run_path(str(ROOT / ".ci" / "check_release.py"))["problems"]


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## (.*)", CHANGELOG, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(maya_core.__version__)} - \d{{4}}-\d\d-\d\d", headings[1])


def test_sections_of_the_changelog_are_those_of_keep_a_changelog() -> None:
    kinds = set(re.findall(r"^### (.*)", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


RELEASED = "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-01-02\n\n### Added\n\n- A thing.\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "expected"),
    [
        ("v1.2.0", RELEASED, ""),
        ("1.2.0", RELEASED, "the tag is 1.2.0"),
        ("v1.3.0", RELEASED, "the tag should be v1.2.0"),
        ("v1.2.0", RELEASED.replace("## 1.2.0", "## 1.1.0"), "has no section"),
        ("v1.2.0", RELEASED.replace(" - 2026-01-02", ""), "has no section"),
        ("v1.2.0", RELEASED.replace("### Added\n\n- A thing.\n", ""), "is empty"),
        ("v1.2.0", RELEASED.replace("## Unreleased\n", "## Unreleased\n\n- Forgotten.\n"), "under '## Unreleased'"),
    ],
)
def test_what_keeps_a_tag_from_being_released(tag: str, changelog: str, expected: str) -> None:
    found = problems(tag, "1.2.0", changelog)
    assert (expected in found[0] and len(found) == 1) if expected else not found


def test_pre_commit_uses_the_versions_of_the_constraints() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in repos}
    assert revisions == {
        "ruff-pre-commit": f"v{pins['ruff']}",
        "mirrors-clang-format": f"v{pins['clang-format']}",
        "pre-commit-hooks": f"v{pins['pre-commit-hooks']}",
    }


def test_the_repository_is_the_same_everywhere() -> None:
    source = toml.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    stated = [ROOT / "pyproject.toml", ROOT / "mkdocs.yml", *(ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()]
    pattern = r"https://github\.com/[\w.-]*maya[\w.-]*/[\w-]+"
    for path in stated:
        assert set(re.findall(pattern, path.read_text())) <= {source}, path.name
    assert source in (ROOT / "mkdocs.yml").read_text()
