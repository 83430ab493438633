"""Fills the pages of the site with what the code itself declares: the options of the commands and the fields of a prediction. MkDocs calls
`on_page_markdown` for every page (mkdocs.yml, `hooks`)."""

from __future__ import annotations

import re
from typing import Any

import typer

from maya_core.cli import COMMANDS, app, calibrate
from maya_core.report.prediction import Prediction

MARK = re.compile(r"<!-- generated: (.*?) -->")
# Parts of a prediction that have a section of their own on the page.
SECTIONS = {
    "step_time_range_s": "#how-wide-is-the-range",
    "mfu": "#how-are-mfu-and-hfu-counted",
    "memory": "#what-does-memory-contain",
    "time": "#where-does-the-time-of-a-step-go",
    "throughput": "#where-do-samples-and-tokens-come-from",
    "energy": "#how-is-energy-estimated",
    "assumptions": "#what-is-assumed",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda found: GENERATED[found[1]](), markdown)


def fields() -> str:
    """The table of a prediction's fields, and one for each of its parts."""
    schema = Prediction.model_json_schema()
    lines = ["| field | meaning |", "|---|---|"]
    for name, field in schema["properties"].items():
        more = f" [More]({SECTIONS[name]})" if name in SECTIONS else ""
        lines.append(f"| `{name}` | {_cell(field['description'])}{more} |")
    for part, content in schema["$defs"].items():
        lines += ["", f"**{part}**: {_cell(content.get('description', ''))}", "", "| field | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(field['description'])} |" for name, field in content["properties"].items()]
    return "\n".join(lines)


def options() -> str:
    """Every command with its options, as `--help` prints them."""
    from importlib.metadata import entry_points

    for integration in entry_points(group=COMMANDS):
        integration.load()(app, calibrate.app)
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


GENERATED = {"fields of a prediction": fields, "options of every command": options}
