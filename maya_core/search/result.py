"""What a search found: the ranked table, the picture of time against cost, the winner's command, and the file that has it all."""

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
from maya_core.search.study import LEFT_OUT, Search, Trial
from maya_core.search.trial import Outcome
from maya_core.version import __version__

SHOWN = 10
RESULT, PICTURE = "result.json", "pareto.png"


def knobs_in_words(job: CheckedRecipe, point: Point) -> str:
    """Only what matters there."""
    canonical = job.canonical(point)
    return ", ".join(f"{name} {canonical[name]}" for name in job.knobs)


def counts_in_words(search: Search) -> str:
    counts = search.counts()
    names = {
        "emulated": "emulated",
        "from a trace": "priced from a trace",
        "cached": "known before",
        LEFT_OUT: "left out",
    }
    return ", ".join(f"{counts[how]:,} {name}" for how, name in names.items() if counts[how]) or "none yet"


def ranked(search: Search, shown: int = SHOWN) -> Table:
    """The best, and the default they are held against; of the knobs those in which they differ."""
    rows = [(str(place), trial) for place, trial in enumerate(search.best()[:shown], 1)]
    first = search.trials[0]
    if first not in [trial for _, trial in rows]:
        rows.append(("default", first))
    varied = [name for name in search.job.knobs if len({str(trial.point[name]) for _, trial in rows}) > 1]
    table = plain_table(
        f"{search.job.name}, the best of {len(search.trials):,} trials",
        ">", "configuration", ">step time", ">MFU", ">memory", ">1k steps",
    )  # fmt: skip
    for name, trial in rows:
        knobs = ", ".join(f"{knob.replace('_', ' ')} {trial.point[knob]}" for knob in varied)
        table.add_row(name, knobs or "the only one", *_figures(trial))
    return table


def _figures(trial: Trial) -> list[str]:
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
        f"{found.mfu:.1%}" if found.mfu is not None else "-",
        _memory(found),
        wording.money(found.usd_per_1k_steps) if found.usd_per_1k_steps is not None else "-",
    ]


def _memory(found: Outcome) -> str:
    if not found.used_bytes or not found.capacity_bytes:
        return "-"
    return f"{found.used_bytes / 2**30:.1f} of {wording.size(found.capacity_bytes)}"


def told(search: Search) -> RenderableType:
    """The end of a search, in words."""
    best = search.best()
    lines: list[RenderableType] = []
    if not best:
        reasons = {trial.broken for trial in search.trials if trial.broken}
        lines.append(Text(f"No configuration may be chosen: {'; '.join(sorted(reasons))}.", style="bold red"))
        return Group(*lines)
    lines.append(ranked(search))
    lines.append(Text(f"{len(search.trials):,} trials: {counts_in_words(search)}."))
    if (saving := saved(search)) is not None:
        lines.append(Text(saving))
    return Group(*lines)


def saved(search: Search) -> str | None:
    """The winner against the default."""
    first, best = search.trials[0].outcome, search.best()[0].outcome
    if search.trials[0] is search.best()[0]:
        return "The default configuration is the best of them."
    before, after = search.goal.values(first), search.goal.values(best)
    if before is None or after is None or first.step_time_s is None or best.step_time_s is None:
        return f"The default configuration does not do ({search.trials[0].broken})."
    if search.goal.objective.endswith("_per_dollar"):  # steps need not be alike
        what = search.goal.objective.removesuffix("_per_dollar")
        return (
            f"{after[0] / before[0]:.2f} times the default's {what} for a dollar: {1 - before[0] / after[0]:.0%} saved."
        )
    faster = f"{first.step_time_s / best.step_time_s:.2f} times as fast as the default"
    if first.usd_per_1k_steps and best.usd_per_1k_steps:
        cheaper = 1 - best.usd_per_1k_steps / first.usd_per_1k_steps
        return f"{faster}, and 1,000 steps cost {wording.money(best.usd_per_1k_steps)} instead of {wording.money(first.usd_per_1k_steps)}: {cheaper:.0%} saved."
    return faster + "."


def front(trials: list[Trial]) -> list[Trial]:
    """Those that no other beats in both time and cost, fastest first."""
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
    """Step time against cost (of memory, where no price is known), the front, the default and the best; and how the best came down."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    timed = [one for one in search.trials if one.outcome.step_time_s]
    priced = all(one.outcome.usd_per_1k_steps for one in timed)
    varied = len({round((one.outcome.usd_per_1k_steps or 0) / (one.outcome.step_time_s or 1), 6) for one in timed}) > 1

    def across(one: Trial) -> float:
        return one.outcome.usd_per_1k_steps or 0.0 if priced and varied else (one.outcome.used_bytes or 0) / 2**30

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    chosen = [one for one in timed if one.broken is None]
    other = [one for one in timed if one.broken is not None]
    left.scatter(
        [across(one) for one in chosen],
        [one.outcome.step_time_s for one in chosen],
        s=22,
        color="#4472c4",
        label="trials",
    )
    if other:
        left.scatter(
            [across(one) for one in other],
            [one.outcome.step_time_s for one in other],
            s=22,
            color="#bbbbbb",
            label="break a constraint",
        )
    if priced and varied:
        line = front(search.trials)
        left.plot(
            [across(one) for one in line],
            [one.outcome.step_time_s for one in line],
            color="#c55a11",
            label="no other is better in both",
        )
    if search.best():
        best = search.best()[0]
        left.scatter(
            [across(best)],
            [best.outcome.step_time_s or 0],
            marker="*",
            s=220,
            color="#c00000",
            label=f"best: {wording.seconds(best.outcome.step_time_s)}",
            zorder=3,
        )
    first = search.trials[0]
    if first.outcome.step_time_s:
        left.scatter(
            [across(first)],
            [first.outcome.step_time_s],
            marker="s",
            s=60,
            color="black",
            label=f"default: {wording.seconds(first.outcome.step_time_s)}",
            zorder=3,
        )
    left.set_xlabel("US dollars per 1,000 steps" if priced and varied else "memory of the fullest GPU, GiB")
    left.set_ylabel("step time, s")
    left.legend(fontsize=8)
    left.set_title("configurations")
    _draw_course(right, search)
    figure.suptitle(search.job.name)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120, metadata={"Software": FileKind.FIGURE.value[1].decode()})
    plt.close(figure)
    return data.getvalue()


def _draw_course(axes: Any, search: Search) -> None:
    lowest, course = None, []
    for trial in search.trials:
        if trial.broken is None and trial.outcome.step_time_s:
            lowest = min(lowest or trial.outcome.step_time_s, trial.outcome.step_time_s)
        course.append(lowest)
    axes.step(
        range(1, len(course) + 1),
        [value if value is not None else float("nan") for value in course],
        where="post",
        color="#4472c4",
    )
    axes.set_xlabel("trials")
    axes.set_ylabel("best step time so far, s")
    axes.set_title("course of the search")
