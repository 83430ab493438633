"""Draws figures with matplotlib, which MLflow depends on: of one prediction, and of predictions compared with actual runs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from maya_core.report import wording
from maya_core.report.prediction import Prediction
from maya_mlflow import keys

# The same colours as on the report page.
PARTS = {
    "compute_s": ("compute", "#0072b2"),
    "exposed_communication_s": ("exposed communication", "#d55e00"),
    "waiting_s": ("waiting for other ranks", "#f0bf9d"),
    "copy_s": ("copies", "#56b4e9"),
    "host_s": ("waiting for the host", "#aab2bb"),
}
CATEGORIES = {
    "parameters": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer_state": "#009e73",
    "buffers": "#d4c400",
    "workspaces": "#8b939c",
    "activations": "#e69f00",
    "temporaries": "#cc79a7",
}
METRICS = {
    keys.STEP_TIME: ("step time", "#0072b2", "o"),
    keys.SAMPLES: ("samples/s", "#56b4e9", "v"),
    keys.TOKENS: ("tokens/s", "#009e73", "s"),
    keys.PEAK_ALLOCATED: ("peak allocated", "#e69f00", "D"),
    keys.PEAK_RESERVED: ("peak reserved", "#cc79a7", "^"),
}
BANDS = (0.05, 0.10)


def of_prediction(prediction: Prediction) -> dict[str, Figure]:
    """Figures by name: where the time of a step goes, and what memory contains at its peak."""
    found = {}
    if prediction.time is not None and prediction.step_time_s:
        seconds = {name: getattr(prediction.time, name) for name in PARTS}
        shares = [(PARTS[name][0], value, PARTS[name][1]) for name, value in seconds.items() if value > 0]
        title = f"Time of a step: {wording.seconds(prediction.step_time_s)}"
        found["step"] = _bar(shares, title, wording.seconds)
    fullest = prediction.memory.fullest
    if fullest is not None and fullest.by_category_bytes:
        by_size = sorted(fullest.by_category_bytes.items(), key=lambda item: -item[1])
        parts = [
            (name.replace("_", " "), float(size), CATEGORIES.get(name, "#8b939c")) for name, size in by_size if size
        ]
        title = f"Peak memory, rank {fullest.rank}: {wording.size(fullest.peak_allocated_bytes)}"
        found["memory"] = _bar(parts, title, wording.size)
    return found


def _bar(parts: Sequence[tuple[str, float, str]], title: str, write: Any) -> Figure:
    figure = Figure(figsize=(7.5, 0.9 + 0.36 * len(parts)), layout="constrained")
    axes = figure.subplots()
    names, values, colours = zip(*parts, strict=True)
    bars = axes.barh(names, values, color=colours, height=0.7)
    axes.bar_label(bars, [f"{write(value)}, {value / sum(values):.0%}" for value in values], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(0, max(values) * 1.3)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


def scatter(metrics: dict[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Predicted against actual values, one plot for each metric, with bands of 5 and 10 %. By key: (predicted, actual)."""
    shown = {key: pair for key, pair in metrics.items() if len(pair[0])}
    figure = Figure(figsize=(3.7 * len(shown) + 0.3, 4.1), layout="constrained")
    for axes, (key, (predicted, actual)) in zip(
        np.atleast_1d(figure.subplots(1, len(shown))), shown.items(), strict=True
    ):
        name, colour, _ = METRICS[key]
        least, most = min(predicted.min(), actual.min()) / 1.25, max(predicted.max(), actual.max()) * 1.25
        line = np.array([least, most])
        for band, shade in zip(BANDS[::-1], ("#e4ecf3", "#c5d8e8"), strict=True):
            axes.fill_between(
                line, line * (1 - band), line * (1 + band), color=shade, linewidth=0, label=f"within {band:.0%}"
            )
        axes.plot(line, line, color="#8b939c", linewidth=0.8)
        axes.scatter(
            actual,
            predicted,
            s=16 if len(actual) > 50 else 28,
            color=colour,
            alpha=0.35 if len(actual) > 50 else 0.9,
            linewidth=0,
        )
        axes.set(
            xscale="log",
            yscale="log",
            xlim=line,
            ylim=line,
            xlabel=f"actual{_unit(key)}",
            ylabel=f"predicted{_unit(key)}",
        )
        axes.set_aspect("equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(_number))
            if most / least < 30:  # a short axis contains few powers of ten
                axis.set_minor_formatter(FuncFormatter(_one_two_five))
            else:
                axis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=8, which="both")
        axes.set_title(f"{name}, {len(actual):,} pair{'s' * (len(actual) != 1)}", fontsize=10)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def _number(value: float, _: object) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _one_two_five(value: float, _: object) -> str:
    return _number(value, _) if f"{value:e}"[0] in "25" else ""


def _unit(key: str) -> str:
    return {"s": ", s", "mb": ", MB"}.get(key.rpartition("_")[2], "") if not key.endswith("per_s") else ""


def errors_over_time(when_ms: np.ndarray, errors: dict[str, np.ndarray]) -> Figure:
    """The error of each pair in percent, at the start of its actual run; NaN if a pair lacks the metric."""
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    axes = figure.subplots()
    many = len(when_ms) > 50
    # Runs that started at nearly the same time would overlap, so they are drawn in their order instead.
    spread = len(when_ms) > 1 and np.ptp(when_ms) > 3_600_000
    where: Any = (
        [datetime.datetime.fromtimestamp(ms / 1000) for ms in when_ms] if spread else np.arange(1, len(when_ms) + 1)
    )
    for band, shade in zip(BANDS[::-1], ("#e4ecf3", "#c5d8e8"), strict=True):
        axes.axhspan(-100 * band, 100 * band, color=shade, linewidth=0)
    for key, values in errors.items():
        if np.isfinite(values).any():
            name, colour, marker = METRICS[key]
            axes.plot(
                where, values, marker, color=colour, markersize=3 if many else 5, alpha=0.4 if many else 0.9, label=name
            )
    axes.axhline(0, color="#8b939c", linewidth=0.8)
    axes.set_ylabel("error of the prediction, %")
    axes.set_xlabel("" if spread else "actual run, oldest first")
    if not spread and not many:
        axes.set_xticks(where)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1.0))
    if spread:
        figure.autofmt_xdate()
    return figure
