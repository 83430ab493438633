"""`maya help`: the pages of docs/ in a terminal, with the tables that come from the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from maya_here import refused
from typer.testing import CliRunner

from maya_core import documentation
from maya_core.cli import app
from maya_core.errors import MayaError
from maya_core.version import PACKAGE

ROOT = Path(__file__).parents[1]
# Where users are sent: in messages, in the code of recipes, in comments of written files.
POINTERS = re.compile(r"`maya help ([a-z][\w-]*)(#[\w-]+)?`")


def test_every_page_is_a_topic() -> None:
    assert PACKAGE.parent == ROOT
    assert list(documentation.titles()) == sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
    listed = CliRunner().invoke(app, ["help"]).output
    for topic, title in documentation.titles().items():
        assert topic in listed
        assert title in listed


def test_pages_have_their_generated_tables() -> None:
    options = CliRunner().invoke(app, ["help", "options"]).output
    assert "## maya what-if" in options
    assert "| `--gpus-per-node` | The GPUs of each node, with as many GPUs in total as were recorded. |" in options
    prediction = CliRunner().invoke(app, ["help", "prediction"]).output
    assert "| `step_time_s` |" in prediction
    assert "| `step_time_range_s` |" in prediction
    assert "More (`maya help prediction#how-wide-is-the-range`)" in prediction
    assert "<!--" not in options + prediction


def test_links_become_commands_and_pictures_their_descriptions() -> None:
    index = CliRunner().invoke(app, ["help", "index"]).output
    assert "the glossary (`maya help glossary`)" in index
    assert "(`maya help prediction#what-would-it-do-on-other-hardware`)" in index
    assert "(On the site: The HTML report.)" in index
    for topic in documentation.titles():
        text = documentation.page(topic, app)
        assert not re.search(r"\]\((images/|[\w-]+\.md)", text), topic
        assert "<!--" not in text, topic


def test_every_link_leads_to_a_section() -> None:
    for topic in documentation.titles():
        for other, anchor in POINTERS.findall(documentation.page(topic, app)):
            documentation.page(f"{other}{anchor}", app)


def test_messages_point_to_topics() -> None:
    sources = [path.read_text() for room in ("maya_core", "integrations") for path in (ROOT / room).rglob("*.py")]
    named = {pointer for source in sources for pointer in POINTERS.findall(source)}
    assert len(named) > 5
    for topic, anchor in named:
        documentation.page(f"{topic}{anchor}", app)


def test_messages_name_no_file_of_the_repository() -> None:
    """An installation has no docs/ folder at a path that a user could guess. Comments and docstrings may name it."""
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in ("maya_core", "integrations")
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in _strings(ast.parse(path.read_text()))
        if re.search(r"docs/[\w-]+\.md|README", str(node.value))
    ]
    assert not named


def _strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The strings of a module, without docstrings."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node


def test_one_section() -> None:
    section = documentation.page("recipes#what-does-a-recipe-look-like", app)
    assert section.startswith("## What does a recipe look like?")
    assert "| `space` |" in section
    assert "Which recipes are included" not in section
    assert documentation.page("docs/recipes.md#what-does-a-recipe-look-like", app) == section


def test_a_comment_in_code_is_no_heading() -> None:
    text = "# Title\n\n```\n# a comment\n```\n\nEnd\n"
    assert documentation.section(text, "title") == text
    with pytest.raises(MayaError, match="has no section 'a-comment'"):
        documentation.section(text, "a-comment")


def test_an_unknown_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = refused("help", "recpies", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert unknown.exit_code == 2
    assert "there is no topic 'recpies'. Did you mean recipes? The topics are: accuracy, " in unknown.stderr
    command = refused("help", "run", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert "`maya run --help` describes the command." in command.stderr
    section = refused("help", "gate#github", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert "Did you mean github-actions?" in section.stderr
