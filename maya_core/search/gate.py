"""The CI gate behind `maya check`: whether a job fits, keeps its limits, and is no worse than its baseline.

This module judges predictions and writes the verdicts as JUnit XML and as a Markdown table. `commands.py` makes the predictions
and sets the exit code.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from maya_core.errors import MayaError
from maya_core.report import wording
from maya_core.report.prediction import Prediction
from maya_core.report.unknown_values import memory_in_words


class Figures(BaseModel):
    """The figures of a prediction that are judged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: int | None  # of the fullest GPU, including memory outside the allocator
    capacity_bytes: int | None
    fits: bool | None
    step_time_s: float | None
    usd_per_1k_steps: float | None

    @classmethod
    def of(cls, prediction: Prediction) -> Figures:
        fullest, cost = prediction.memory.fullest, prediction.cost
        return cls(
            memory_bytes=fullest.peak_reserved_bytes + fullest.outside_allocator_bytes if fullest else None,
            capacity_bytes=fullest.capacity_bytes if fullest else None,
            fits=False if prediction.hangs else prediction.memory.fits,
            step_time_s=prediction.step_time_s,
            usd_per_1k_steps=cost.usd_per_1k_steps if cost else None,
        )


class Baseline(BaseModel):
    """Earlier figures of jobs, by the name of the job."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["maya-baseline"] = "maya-baseline"
    version: Literal[1] = 1
    jobs: dict[str, Figures]
    any_job: Figures | None = None  # for jobs that have no figures of their own

    def of(self, job: str) -> Figures | None:
        """The earlier figures of a job; None if it is not in the baseline, or if it failed then."""
        found = self.jobs.get(job, self.any_job)
        return found if found is not None and found.step_time_s is not None else None


@dataclass(frozen=True)
class Limits:
    max_memory_bytes: float | None = None
    max_step_time_s: float | None = None
    max_usd_per_1k_steps: float | None = None
    max_regression: float | None = None  # compared with the baseline, as a share


@dataclass(frozen=True)
class Check:
    """One condition, and whether the job meets it."""

    name: str
    ok: bool
    found: str
    limit: str
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    job: str
    figures: Figures
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


# What is judged: its name, its field in `Figures`, how it is written, and its field in `Limits`.
JUDGED = (
    ("memory", "memory_bytes", wording.size, "max_memory_bytes"),
    ("step time", "step_time_s", wording.seconds, "max_step_time_s"),
    ("cost per 1,000 steps", "usd_per_1k_steps", wording.money, "max_usd_per_1k_steps"),
)


def judge(job: str, prediction: Prediction, limits: Limits, baseline: Baseline | None) -> Verdict:
    """Judges a prediction. A limit on a figure that is not known counts as broken, and the check says so."""
    figures = Figures.of(prediction)
    checks = [_fits(prediction, figures)]
    before = baseline.of(job) if baseline else None
    for name, attribute, write, limit_name in JUDGED:
        value: float | None = getattr(figures, attribute)
        limit: float | None = getattr(limits, limit_name)
        if limit is not None:
            ok = value is not None and value <= limit
            checks.append(
                Check(f"{name} within limit", ok, write(value), write(limit), "" if value is not None else "not known")
            )
        earlier = getattr(before, attribute) if before else None
        if limits.max_regression is not None and earlier is not None:
            change = value / earlier - 1 if value is not None else None
            ok = change is not None and change <= limits.max_regression + 1e-9
            shown = f"{write(value)} ({change:+.1%})" if change is not None else write(value)
            checks.append(Check(f"{name} vs. baseline", ok, shown, f"{write(earlier)} {limits.max_regression:+.1%}"))
    if baseline is not None and before is None:
        checks.append(Check("baseline", True, "new", "", "the baseline does not contain this job"))
    return Verdict(job, figures, checks)


def _fits(prediction: Prediction, figures: Figures) -> Check:
    found = wording.size(figures.memory_bytes)
    if prediction.memory.fits is False:  # other ranks may wait for the failed one, which is not a hang of the program
        return Check("fits", False, "out of memory", wording.size(figures.capacity_bytes))
    if prediction.hangs:
        return Check("runs", False, "hangs", "", prediction.hangs[0])
    if figures.step_time_s is None:
        return Check("runs", False, prediction.trace.ended, "", "the program did not complete a step")
    if prediction.trace.ended == "failed":
        return Check("runs", False, "failed", "", "the program ended with an error")
    if prediction.memory.fits is None:
        why = memory_in_words(prediction.memory) if prediction.memory.depends_on else "not known"
        return Check("fits", False, found, wording.size(figures.capacity_bytes), why)
    return Check("fits", True, found, wording.size(figures.capacity_bytes))


def failed(job: str, why: str) -> Verdict:
    """The verdict on a program without a prediction."""
    nothing = Figures(memory_bytes=None, capacity_bytes=None, fits=None, step_time_s=None, usd_per_1k_steps=None)
    return Verdict(job, nothing, [Check("runs", False, "failed", "", why)])


def read_baseline(path: Path) -> Baseline:
    """Reads a baseline. A single prediction also serves as one: all jobs are compared with it."""
    try:
        raw = json.loads(path.read_bytes())
        if raw.get("format") == "maya-prediction":
            return Baseline(jobs={}, any_job=Figures.of(Prediction.model_validate(raw)))
        return Baseline.model_validate(raw)
    except FileNotFoundError as error:
        raise MayaError(f"no baseline at {path}.", "`maya check ... --write-baseline FILE` writes one.") from error
    except (ValueError, ValidationError, AttributeError) as error:
        raise MayaError(
            f"{path} is not a baseline: {str(error).splitlines()[0]}", "Write a new one with --write-baseline."
        ) from error


def baseline_of(verdicts: list[Verdict], before: Baseline | None = None) -> str:
    """The text of a new baseline. Jobs that were not judged, or that have no figures now, keep their earlier ones."""
    known = {one.job: one.figures for one in verdicts if one.figures.step_time_s is not None}
    jobs = (before.jobs if before else {}) | known
    return Baseline(jobs=dict(sorted(jobs.items()))).model_dump_json(indent=1) + "\n"


def markdown(verdicts: list[Verdict]) -> str:
    """The verdicts as a Markdown table, for a comment on a pull request."""
    lines = [
        "### Maya: predicted before any GPU is reserved",
        "",
        "| job | | check | predicted | limit |",
        "|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        for place, check in enumerate(verdict.checks):
            name = f"`{verdict.job}`" if not place else ""
            why = f" ({_cell(check.why)})" if check.why else ""
            lines.append(
                f"| {name} | {'✅' if check.ok else '❌'} | {check.name}{why} | {_cell(check.found)} | {_cell(check.limit)} |"
            )
    bad = sum(not verdict.ok for verdict in verdicts)
    lines += ["", f"{len(verdicts)} job{'s' * (len(verdicts) != 1)}, {bad} failed." if bad else "All within limits."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Escapes a text for a cell: the `<module>` of a stack trace is not HTML."""
    short = text if len(text) <= 300 else f"{text[:300]}..."
    for letter, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("\n", " ")):
        short = short.replace(letter, escaped)
    return short


def junit(verdicts: list[Verdict]) -> str:
    suites = xml.Element("testsuites", name="maya check")
    for verdict in verdicts:
        failed = sum(not check.ok for check in verdict.checks)
        suite = xml.SubElement(
            suites, "testsuite", name=verdict.job, tests=str(len(verdict.checks)), failures=str(failed), errors="0"
        )
        for check in verdict.checks:
            case = xml.SubElement(suite, "testcase", classname=f"maya.{verdict.job}", name=check.name)
            if not check.ok:
                message = f"{check.found}, limit {check.limit}" if check.limit else check.found
                xml.SubElement(case, "failure", message=_clean(message)).text = _clean(check.why or message)
    xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(suites, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    """Removes characters that XML cannot contain."""
    return "".join(letter for letter in text if letter in "\n\t" or ord(letter) >= 32)
