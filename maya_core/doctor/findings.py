"""Findings of `maya doctor`, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.table import Table
from rich.text import Text


class State(str, Enum):
    OK = "ok"
    ABSENT = "absent"  # something optional is not installed
    WARNING = "warning"  # Maya runs, but not everything may be as expected
    PROBLEM = "problem"  # Maya cannot run

    __str__ = str.__str__


STYLES = {State.OK: "green", State.ABSENT: "dim", State.WARNING: "yellow", State.PROBLEM: "bold red"}

# What there is to do, in this order.
HEADINGS = {
    State.PROBLEM: "To solve the problems",
    State.WARNING: "To mend what the warnings are about",
    State.ABSENT: "To install what is optional, if you need it",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    found: str
    state: State = State.OK
    advice: str = ""  # what to do about it

    def as_json(self, part: str) -> dict[str, str]:
        return {"part": part, "subject": self.subject, "state": self.state, "found": self.found, "advice": self.advice}


Report = dict[str, list[Finding]]  # by part


def can_run(report: Report) -> bool:
    return not any(finding.state is State.PROBLEM for part in report.values() for finding in part)


def as_json(report: Report) -> dict[str, Any]:
    return {
        "ok": can_run(report),
        "findings": [finding.as_json(part) for part, found in report.items() for finding in found],
    }


def render(report: Report) -> Iterable[Table | Text]:
    """One table for each part, and then everything that there is to do: a command to copy must not be broken in a table's cell."""
    width = max(len(finding.subject) for part in report.values() for finding in part)
    todo: dict[State, list[str]] = {state: [] for state in State}
    for part, found in report.items():
        table = Table(title=part, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, min_width=max(len(state) for state in State))
        table.add_column(no_wrap=True, min_width=width)
        table.add_column(overflow="fold")
        for finding in found:
            table.add_row(Text(finding.state, style=STYLES[finding.state]), finding.subject, Text(finding.found))
            if finding.advice and finding.advice not in todo[finding.state]:
                todo[finding.state].append(finding.advice)
        yield table
        yield Text()
    for state, heading in HEADINGS.items():
        if todo[state]:
            yield Text(heading, style="bold")
            yield from (Text(f"  {advice}") for advice in todo[state])
            yield Text()
    verdict = "Maya can run here." if can_run(report) else "Maya cannot run here until the problems are solved."
    yield Text(verdict, style="bold green" if can_run(report) else "bold red")
