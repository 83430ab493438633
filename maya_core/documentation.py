"""The documentation that is installed with Maya: the pages of docs/, which `maya help` prints and the site shows.

Some tables of the pages come from the code: the options of the commands and the fields of a prediction. A page has a mark where such a table
belongs (`filled`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table

from maya_core.calibrate import commands as calibrate
from maya_core.errors import MayaError
from maya_core.report.field_tables import fields, fields_of_parts
from maya_core.version import PACKAGE

# Entry points: functions that receive the app and its `calibrate`, and add the commands of their integration.
COMMANDS = "maya.commands"
# Between the marks stands what readers see who read the page in the repository.
MARK = re.compile(r"<!-- generated: (.*?) -->.*?<!-- end -->", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]+)\]\(([\w-]+)\.md(#[\w-]+)?\)")
LINK_IN_PAGE = re.compile(r"\[([^\]]+)\]\((#[\w-]+)\)")


def add_integrations(app: typer.Typer) -> None:
    """Adds the commands of all installed integrations."""
    for integration in entry_points(group=COMMANDS):
        integration.load()(app, calibrate.app)


# ---- pages ----


def folder() -> Path:
    """The folder of the pages: next to the package in a checkout, inside it in an installation."""
    inside = PACKAGE / "docs"
    return inside if inside.is_dir() else PACKAGE.parent / "docs"


def titles() -> dict[str, str]:
    """The title of every page, by its topic."""
    return {page.stem: page.read_text().partition("\n")[0].removeprefix("# ") for page in sorted(folder().glob("*.md"))}


def page(topic: str, app: typer.Typer) -> str:
    """A page, or a section of it (`recipes#what-does-a-recipe-look-like`), as text for a terminal."""
    name, _, anchor = topic.partition("#")
    name = name.rpartition("/")[2].removesuffix(".md").lower()
    topics = titles()
    if name not in topics:
        commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        hint = f"`maya {name} --help` describes the command. " if name in commands else ""
        raise MayaError(f"there is no topic '{name}'.", f"{hint}{_instead(name, list(topics), 'topics')}")
    text = filled((folder() / f"{name}.md").read_text(), app)
    return _for_terminal(section(text, anchor) if anchor else text, name)


def section(text: str, anchor: str) -> str:
    """The part of a page below the heading with this anchor, down to the next heading of its level."""
    found = list(_headings(text))
    for at, (start, level, own) in enumerate(found):
        if own == anchor:
            return text[start : next((end for end, other, _ in found[at + 1 :] if other <= level), None)]
    anchors = [own for _, level, own in found if level > 1]
    raise MayaError(f"the page has no section '{anchor}'.", _instead(anchor, anchors, "sections"))


def _instead(name: str, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}The {what} are: {', '.join(known)}."


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """Where each heading is in the text, its level, and its anchor, which is the one that the site gives it."""
    position, in_code = 0, False
    for line in text.splitlines(keepends=True):
        in_code ^= line.startswith("```")
        if not in_code and (heading := re.match(r"(#+) (.*)", line)):
            words = re.sub(r"[^\w\s-]", "", heading[2]).strip().lower()
            yield position, len(heading[1]), re.sub(r"[\s-]+", "-", words)
        position += len(line)


def _for_terminal(text: str, name: str) -> str:
    """Links to pages become commands, and pictures, which are not installed, their descriptions."""
    text = COMMENT.sub("", text)
    text = PICTURE.sub(lambda found: f"(On the site: {found[1]}.)", text)
    text = LINK.sub(lambda found: f"{found[1]} (`maya help {found[2]}{found[3] or ''}`)", text)
    return LINK_IN_PAGE.sub(lambda found: f"{found[1]} (`maya help {name}{found[2]}`)", text)


class _FoldedTable(TableElement):
    """A table that breaks long words instead of cutting them off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for made in super().__rich_console__(console, options):
            if isinstance(made, Table):
                for column in made.columns:
                    column.overflow = "fold"
            yield made


class Page(Markdown):
    """A page as a terminal shows it."""

    elements = {**Markdown.elements, "table_open": _FoldedTable}


# ---- tables from the code ----


def filled(text: str, app: typer.Typer) -> str:
    """A page with its tables in the places of their marks. Marks of tables that only the site has stay."""
    tables: dict[str, Callable[[], str]] = {
        "fields of a prediction": fields,
        "fields of the parts": fields_of_parts,
        "options of every command": lambda: _options(app),
    }
    return MARK.sub(lambda found: tables[found[1]]() if found[1] in tables else found[0], text)


def _options(app: typer.Typer) -> str:
    """Every command with its options, as `--help` prints them."""
    lines: list[str] = []
    for name, command in sorted(_commands(typer.main.get_command(app), "maya").items()):
        lines += [f"## {name}", "", _cell(command.help or ""), ""]
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(command: Any, name: str) -> dict[str, Any]:
    """Every command below this one, by its full name."""
    below = getattr(command, "commands", None)
    if not below:
        return {name: command}
    found: dict[str, Any] = {}
    for each, inner in below.items():
        found |= _commands(inner, f"{name} {each}")
    return found


def _row(parameter: Any) -> str:
    flags = (
        ", ".join(f"`{flag}`" for flag in parameter.opts if flag.startswith("-"))
        or f"`{parameter.metavar or parameter.name}`"
    )
    shown = parameter.default if parameter.default not in (None, False, ()) and not callable(parameter.default) else ""
    default = f"`{getattr(shown, 'value', shown)}`" if shown != "" else ""
    return f"| {flags} | {_cell(getattr(parameter, 'help', '') or '')} | {default} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
