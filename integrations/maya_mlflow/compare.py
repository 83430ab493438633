"""Compares predictions with actual runs: tables, figures, and errors that are logged on the runs. Finding the pairs is the task of
pairs.py."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from maya_core.errors import MayaError
from maya_core.files import FileKind, check_target, write_file
from maya_core.report import wording
from maya_mlflow import keys
from maya_mlflow.pairs import Pair, ask

NAMES = {
    keys.STEP_TIME: "step time",
    keys.SAMPLES: "samples/s",
    keys.TOKENS: "tokens/s",
    keys.PEAK_ALLOCATED: "peak allocated",
    keys.PEAK_RESERVED: "peak reserved",
}
ROWS = 20  # of a table; of more pairs the worst are shown
NEWEST = 10  # pairs that are checked for drift
AT_ONCE = 8  # concurrent requests
SHOWN = 50  # with more requests, progress is shown
FIGURES = ("predicted_vs_actual.png", "errors.png")


def metric_in_words(key: str, value: float) -> str:
    if key == keys.STEP_TIME:
        return wording.seconds(value)
    return wording.size(value * keys.MB) if key.endswith("_mb") else wording.count(value)


def percent(error: float) -> str:
    return f"{error:+.1f} %" if abs(error) < 1000 else f"{error:+,.0f} %"


def one_pair(pair: Pair) -> Table:
    table = Table(title=f"{pair.predicted.name} and {pair.actual.name}, paired by {pair.by}")
    for title in ("", "predicted", "actual", "error"):
        table.add_column(title, justify="left" if not title else "right")
    for key, error in pair.errors().items():
        mine, real = pair.predicted.metrics[key], pair.actual.metrics[key]
        table.add_row(NAMES[key], metric_in_words(key, mine), metric_in_words(key, real), percent(error))
    return table


def many_pairs(pairs: list[Pair]) -> Table:
    """The pairs, newest last. If there are many, those with the largest errors."""
    shown = pairs
    title = f"{len(pairs)} pairs"
    if len(pairs) > ROWS:
        worst = sorted(pairs, key=lambda pair: -max(map(abs, pair.errors().values()), default=0.0))
        shown = worst[:ROWS]
        title = f"{len(pairs):,} pairs, the {ROWS} with the largest errors"
    used = [key for key in keys.COMPARED if any(key in pair.errors() for pair in shown)]
    table = Table(title=title)
    table.add_column("actual run")
    table.add_column("step time", justify="right")
    for key in used:
        table.add_column(f"error of {NAMES[key]}", justify="right")
    for pair in shown:
        errors = pair.errors()
        table.add_row(
            f"{pair.actual.name} {pair.actual.run_id[:8]}",
            wording.seconds(pair.actual.metrics.get(keys.STEP_TIME)),
            *(percent(errors[key]) if key in errors else "-" for key in used),
        )
    return table


def summary(pairs: list[Pair]) -> Table:
    table = Table(title="all pairs")
    for title in ("", "pairs", "median error", "90 % within", "within 5 %", "within 10 %"):
        table.add_column(title, justify="left" if not title else "right")
    for key, errors in by_metric(pairs).items():
        sizes = np.abs(errors[np.isfinite(errors)])
        if len(sizes):
            table.add_row(
                NAMES[key], f"{len(sizes):,}", f"{np.median(sizes):.1f} %", f"{np.quantile(sizes, 0.9):.1f} %",
                f"{np.mean(sizes <= 5):.0%}", f"{np.mean(sizes <= 10):.0%}",
            )  # fmt: skip
    return table


def by_metric(pairs: list[Pair]) -> dict[str, np.ndarray]:
    """The errors in percent, one for each pair; NaN if a pair lacks the metric."""
    every = [pair.errors() for pair in pairs]
    return {key: np.array([errors.get(key, np.nan) for errors in every]) for key in keys.COMPARED}


def drift(pairs: list[Pair]) -> dict[str, float]:
    """The median absolute error of the newest pairs, by metric."""
    found = {}
    for key, errors in by_metric(pairs).items():
        known = np.abs(errors[np.isfinite(errors)])[-NEWEST:]
        if len(known):
            found[key] = float(np.median(known))
    return found


def say_differences(console: Console, pairs: list[Pair]) -> None:
    """Warns about pairs of different jobs, which a pair id can join: their errors do not describe the prediction."""
    for pair in [pair for pair in pairs if pair.differences()][:5]:
        console.print(
            f"[yellow]{pair.predicted.name} and {pair.actual.name} {pair.actual.run_id[:8]} are not the same job: {'; '.join(pair.differences())}.[/yellow]",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    if others := sum(pair.is_of_other_hardware for pair in pairs):
        console.print(
            f"[yellow]{others} pair{'s' * (others != 1)} of different hardware count{'s' * (others == 1)} neither for the medians nor for the "
            "exit code.[/yellow]",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


def check_folder(folder: Path) -> None:
    """Checks, before any work is done, that the figures can be written there."""
    if folder.exists() and not folder.is_dir():
        raise MayaError(f"--out {folder} is a file.", "Give a folder for the figures.")
    if folder.exists():
        for name in FIGURES:
            check_target(folder / name, FileKind.FIGURE)


def write_figures(pairs: list[Pair], folder: Path) -> list[Path]:
    from maya_mlflow import figures

    if not pairs:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    compared = {}
    for key in keys.COMPARED:
        both = [pair for pair in pairs if key in pair.errors()]
        compared[key] = (
            np.array([pair.predicted.metrics[key] for pair in both]),
            np.array([pair.actual.metrics[key] for pair in both]),
        )
    when = np.array([pair.actual.started_ms for pair in pairs])
    drawn = (figures.scatter(compared), figures.errors_over_time(when, by_metric(pairs)))
    written = []
    for name, figure in zip(FIGURES, drawn, strict=True):
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=130, metadata={"Software": FileKind.FIGURE.value[1].decode()})
        write_file(folder / name, data.getvalue(), FileKind.FIGURE)
        written.append(folder / name)
    return written


def log_errors(client: Any, pairs: list[Pair]) -> int:
    """`error/*_pct` on both runs of each pair, where it is not there yet; runs are neither begun nor ended. How many were told."""
    wanted: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    for pair in pairs:
        errors = {keys.error_key(key): error for key, error in pair.errors().items()}
        for run in (pair.predicted, pair.actual):  # of a prediction with several actual runs, the newest counts
            wanted[run.run_id] = errors, run.metrics
    new = {
        run_id: errors
        for run_id, (errors, there) in wanted.items()
        if any(there.get(k) != v for k, v in errors.items())
    }
    from mlflow.entities import Metric
    from mlflow.utils.time import get_current_time_millis

    now = get_current_time_millis()

    def log(item: tuple[str, dict[str, float]]) -> None:
        run_id, errors = item
        ask(client.log_batch, run_id, metrics=[Metric(key, error, now, 0) for key, error in errors.items()])

    with ThreadPoolExecutor(AT_ONCE) as pool, Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("logging errors on the runs", total=len(new), visible=len(new) > SHOWN)
        for _ in pool.map(log, new.items()):
            bar.advance(task)
    return len(new)


def as_json(pairs: list[Pair]) -> list[dict[str, object]]:
    return [
        {
            "predicted": pair.predicted.run_id,
            "actual": pair.actual.run_id,
            "paired_by": pair.by,
            "error_pct": {key.partition("/")[2]: error for key, error in pair.errors().items()},
            "differences": pair.differences(),
        }
        for pair in pairs
    ]
