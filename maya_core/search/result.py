"""Presents what a search found: the ranked table, the summary, the picture and `result.json`.

The trials and their ranking come from `study.py`; this module only words, draws and writes them.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from maya_core.files import FileKind, write_file
from maya_core.report import wording
from maya_core.report.terminal import plain_table
from maya_core.search.recipe import CheckedRecipe, Point
from maya_core.search.study import SKIPPED, Search, Trial
from maya_core.search.trial import Outcome
from maya_core.version import __version__

SHOWN = 10
RESULT, PICTURE = "result.json", "pareto.png"


def knobs_in_words(job: CheckedRecipe, point: Point) -> str:
    """A configuration in words: the value of every knob, as the program sees it."""
    canonical = job.canonical(point)
    return ", ".join(f"{name} {canonical[name]}" for name in job.knobs)


def counts_in_words(search: Search) -> str:
    counts = search.counts()
    names = {
        "emulated": "emulated",
        "from a trace": "predicted from an earlier trace",
        "cached": "already predicted before",
        SKIPPED: "skipped",
    }
    return ", ".join(f"{counts[how]:,} {name}" for how, name in names.items() if counts[how]) or "none yet"


def ranked(search: Search, shown: int = SHOWN) -> Table:
    """The best trials, and the default that they are compared with. Only knobs in which they differ are listed."""
    rows = [(str(place), trial) for place, trial in enumerate(search.best()[:shown], 1)]
    first = search.trials[0]
    if first not in [trial for _, trial in rows]:
        rows.append(("default", first))
    varied = [name for name in search.job.knobs if len({str(trial.point[name]) for _, trial in rows}) > 1]
    table = plain_table(
        f"{search.job.name}, the best of {len(search.trials):,} trials",
        ">", "configuration", ">step time", ">MFU", ">memory", ">cost of 1k steps",
    )  # fmt: skip
    for name, trial in rows:
        knobs = ", ".join(f"{knob.replace('_', ' ')} {trial.point[knob]}" for knob in varied)
        table.add_row(name, knobs or "the only configuration", *figures(trial))
    return table


def figures(trial: Trial) -> list[str]:
    """Step time, MFU, memory and cost of a trial, as cells of a table."""
    found = trial.outcome
    if trial.broken is not None:
        return [
            trial.broken if found.step_time_s is None else f"{wording.seconds(found.step_time_s)}, {trial.broken}",
            "-",
            _memory(found),
            "-",
        ]
    return [
        wording.seconds(found.step_time_s),
        wording.share(found.mfu) if found.mfu is not None else "-",
        _memory(found),
        wording.money(found.usd_per_1k_steps) if found.usd_per_1k_steps is not None else "-",
    ]


def _memory(found: Outcome) -> str:
    if not found.used_bytes or not found.capacity_bytes:
        return "-"
    return f"{found.used_bytes / 2**30:.1f} of {wording.size(found.capacity_bytes)}"


def summary(search: Search) -> RenderableType:
    """What the search found, for the terminal."""
    best = search.best()
    lines: list[RenderableType] = []
    if not best:
        reasons = {trial.broken for trial in search.trials if trial.broken}
        lines.append(Text(f"No configuration meets all conditions: {'; '.join(sorted(reasons))}.", style="bold red"))
        return Group(*lines)
    lines.append(ranked(search))
    lines.append(Text(f"{len(search.trials):,} trials: {counts_in_words(search)}."))
    lines.append(Text(saved(search)))
    return Group(*lines)


def saved(search: Search) -> str:
    """The best configuration compared with the default."""
    first, best = search.trials[0].outcome, search.best()[0].outcome
    if search.trials[0] is search.best()[0]:
        return "The default configuration is the best one."
    before, after = search.goal.values(first), search.goal.values(best)
    if before is None or after is None or first.step_time_s is None or best.step_time_s is None:
        return f"The default configuration does not meet all conditions: {search.trials[0].broken}."
    if search.goal.objective.endswith("_per_dollar"):  # steps may do different amounts of work
        what = search.goal.objective.removesuffix("_per_dollar")
        return (
            f"The best configuration processes {after[0] / before[0]:.2f} times as many {what} per dollar as the default, "
            f"which saves {wording.percent(1 - before[0] / after[0])}."
        )
    faster = f"The best configuration is {first.step_time_s / best.step_time_s:.2f} times as fast as the default"
    if first.usd_per_1k_steps and best.usd_per_1k_steps:
        cheaper = 1 - best.usd_per_1k_steps / first.usd_per_1k_steps
        costs = f"{wording.money(best.usd_per_1k_steps)} instead of {wording.money(first.usd_per_1k_steps)}"
        return f"{faster}, and 1,000 steps cost {costs}, which saves {wording.percent(cheaper)}."
    return faster + "."


def front(trials: list[Trial]) -> list[Trial]:
    """The trials that no other trial beats in both time and cost, fastest first."""
    usable = [one for one in trials if one.broken is None and one.outcome.step_time_s and one.outcome.usd_per_1k_steps]
    found: list[Trial] = []
    for trial in sorted(usable, key=lambda one: (one.outcome.step_time_s, one.outcome.usd_per_1k_steps, one.number)):
        if not found or (trial.outcome.usd_per_1k_steps or 0) < (found[-1].outcome.usd_per_1k_steps or 0):
            found.append(trial)
    return found


def as_json(search: Search) -> dict[str, Any]:
    best = search.best()
    return {
        "format": "maya-search",
        "maya": __version__,
        "recipe": search.job.name,
        "goal": search.goal.model_dump(),
        "plan": search.plan.model_dump(),
        "points": search.job.size,
        "possible": search.possible,
        "counts": dict(search.counts()),
        "best": best[0].number if best else None,
        "command": search.job.program(best[0].point).typed if best else None,
        "trials": [
            {
                "number": trial.number,
                "point": trial.point,
                "broken": trial.broken,
                "how": trial.how,
                "outcome": trial.outcome.model_dump(exclude={"how"}),
            }
            for trial in search.trials
        ],
    }


def write(search: Search, folder: Path) -> list[Path]:
    written = [folder / RESULT]
    write_file(folder / RESULT, json.dumps(as_json(search), indent=1) + "\n", FileKind.SEARCH)
    if any(trial.outcome.step_time_s for trial in search.trials):
        picture = draw(search)
        if picture is not None:
            write_file(folder / PICTURE, picture, FileKind.FIGURE)
            written.append(folder / PICTURE)
    return written


def draw(search: Search) -> bytes | None:
    """The picture of a search: its configurations, and how the best step time fell. None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    _draw_configurations(left, search)
    _draw_progress(right, search)
    figure.suptitle(search.job.name)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120, metadata={"Software": FileKind.FIGURE.value[1].decode()})
    plt.close(figure)
    return data.getvalue()


def _draw_configurations(axes: Any, search: Search) -> None:
    """Step time against cost; against memory, if prices are unknown or all GPUs cost the same."""
    timed = [one for one in search.trials if one.outcome.step_time_s]
    hourly = {round((one.outcome.usd_per_1k_steps or 0) / (one.outcome.step_time_s or 1), 6) for one in timed}
    by_cost = all(one.outcome.usd_per_1k_steps for one in timed) and len(hourly) > 1

    def places(trials: list[Trial]) -> tuple[list[float], list[float | None]]:
        costs = [one.outcome.usd_per_1k_steps or 0.0 for one in trials]
        sizes = [(one.outcome.used_bytes or 0) / 2**30 for one in trials]
        return costs if by_cost else sizes, [one.outcome.step_time_s for one in trials]

    meeting = [one for one in timed if one.broken is None]
    breaking = [one for one in timed if one.broken is not None]
    axes.scatter(*places(meeting), s=22, color="#4472c4", label="trials")
    if breaking:
        axes.scatter(*places(breaking), s=22, color="#bbbbbb", label="break a condition")
    if by_cost:
        axes.plot(*places(front(search.trials)), color="#c55a11", label="no other is better in both")
    if search.best():
        best = search.best()[0]
        label = f"best: {wording.seconds(best.outcome.step_time_s)}"
        axes.scatter(*places([best]), marker="*", s=220, color="#c00000", label=label, zorder=3)
    first = search.trials[0]
    if first.outcome.step_time_s:
        label = f"default: {wording.seconds(first.outcome.step_time_s)}"
        axes.scatter(*places([first]), marker="s", s=60, color="black", label=label, zorder=3)
    axes.set_xlabel("US dollars per 1,000 steps" if by_cost else "memory of the fullest GPU, GiB")
    axes.set_ylabel("step time, s")
    axes.legend(fontsize=8)
    axes.set_title("configurations")


def _draw_progress(axes: Any, search: Search) -> None:
    lowest: float | None = None
    lows: list[float] = []
    for trial in search.trials:
        if trial.broken is None and trial.outcome.step_time_s:
            lowest = min(lowest or trial.outcome.step_time_s, trial.outcome.step_time_s)
        lows.append(lowest if lowest is not None else float("nan"))
    axes.step(range(1, len(lows) + 1), lows, where="post", color="#4472c4")
    axes.set_xlabel("trials")
    axes.set_ylabel("best step time so far, s")
    axes.set_title("progress of the search")
