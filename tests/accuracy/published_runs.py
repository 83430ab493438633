"""Predictions against published training runs: python tests/accuracy/published_runs.py DATA

Every run of runs/catalog.py is emulated once, by `maya run` on a script of runs/workloads, and predicted from its trace.
Traces are kept; a run whose script and arguments have not changed is not emulated again. DATA is a folder of measurements.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from runs.catalog import SOURCES, Run, SkippedRow, read

from maya_core.errors import MayaError
from maya_core.pipeline import predict
from maya_core.request import Request
from maya_core.trace.job import read_job
from maya_core.trace.run_folder import find_run

WORKLOADS = Path(__file__).parent / "runs" / "workloads"
BEGIN, END = "<!-- published runs: made by tests/accuracy/published_runs.py -->", "<!-- end of published runs -->"


@dataclass(frozen=True)
class Predicted:
    step_s: float | None
    range_s: tuple[float, float] | None
    memory_bytes: dict[str, int]  # by metric, of the rank that needs most
    confidence: str


@dataclass(frozen=True)
class Compared:
    run: Run
    predicted: Predicted

    @property
    def time_error(self) -> float | None:
        """Signed, as a share of what was published."""
        if self.run.step_s is None or self.predicted.step_s is None:
            return None
        return self.predicted.step_s / self.run.step_s - 1

    @property
    def in_range(self) -> bool | None:
        """Whether the published time is within the range that was predicted."""
        if self.run.step_s is None or self.predicted.range_s is None:
            return None
        low, high = self.predicted.range_s
        return low <= self.run.step_s <= high

    @property
    def memory_error(self) -> float | None:
        if self.run.memory is None:
            return None
        return self.predicted.memory_bytes[self.run.memory.metric] / self.run.memory.bytes - 1


def sources_of(script: str) -> list[Path]:
    """The script, and the modules beside it that it imports."""
    found, open_ends = [WORKLOADS / script], [WORKLOADS / script]
    while open_ends:
        text = open_ends.pop().read_text()
        for path in sorted(WORKLOADS.glob("*.py")):
            if path not in found and f"\nfrom {path.stem} import" in text:
                found.append(path)
                open_ends.append(path)
    return found


def key_of(run: Run) -> str:
    """Identifies what is emulated. Runs that differ only in their network or their published figures have the same key."""
    code = [ast.dump(ast.parse(path.read_text())) for path in sources_of(run.script)]  # whatever its layout
    parts = [run.gpu, run.nodes, run.gpus_per_node, run.steps, run.arguments, code]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def command_of(run: Run, folder: Path) -> list[str]:
    script = [str(WORKLOADS / run.script), *run.arguments]
    launcher = ["torchrun", "--nnodes", str(run.nodes), "--nproc-per-node", str(run.gpus_per_node)]
    started = [*launcher, *script] if run.gpus > 1 else ["python", *script]
    maya = Path(sys.executable).with_name("maya")
    options = ["--gpu", run.gpu, "--steps", str(run.steps), "--out", str(folder)]
    return [str(maya), "run", *options, "--", *started]


def emulate(run: Run, key: str, folder: Path, timeout_s: float, again: bool) -> str | None:
    """Writes the trace into the folder, and its key, command and output beside it. Returns the problem, if there was one."""
    record = folder.with_suffix(".run.json")
    if (
        not again
        and record.exists()
        and (find_run(folder) / "job.json").exists()
        and json.loads(record.read_text())["key"] == key
    ):
        return None
    record.unlink(missing_ok=True)
    command = command_of(run, folder)
    begun = time.monotonic()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with folder.with_suffix(".log").open("w") as log:
        environment = os.environ | {"PATH": path}
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True) as process:
            try:
                process.wait(timeout_s)
            except BaseException as error:  # its ranks end with it, whatever ends this program
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    return f"not done after {timeout_s:.0f} s"
                raise
    if process.returncode:
        last = [line for line in folder.with_suffix(".log").read_text().splitlines() if line.strip()][-1:]
        return f"exit code {process.returncode}: {' '.join(last)[:200]} (log: {folder.with_suffix('.log')})"
    seconds = round(time.monotonic() - begun, 1)
    record.write_text(json.dumps({"key": key, "seconds": seconds, "command": command}, indent=1))
    return None


def predict_run(run: Run, folder: Path) -> Predicted:
    """The one place that asks for a prediction."""
    prediction = predict(read_job(folder), Request(attention=run.attention), run.cluster())
    ranks = prediction.memory.ranks
    memory = {
        "allocated": max(device.peak_allocated_bytes for device in ranks),
        "reserved": max(device.peak_reserved_bytes for device in ranks),
        "device": max(device.peak_reserved_bytes + device.outside_allocator_bytes for device in ranks),
    }
    known = prediction.confidence
    shares = (
        {name: getattr(known, name) for name in ("measured", "interpolated", "extrapolated", "bound")} if known else {}
    )
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return Predicted(prediction.step_time_s, prediction.step_time_range_s, memory, words)


def variety_first(runs: list[Run]) -> list[Run]:
    """Takes sources in turn, and rows far apart first, so that a comparison that is interrupted has covered a bit of everything."""
    by_source = [list(group) for _, group in itertools.groupby(sorted(runs, key=_place), key=lambda run: run.source)]
    spread = [[run for start in (0, 4, 2, 6, 1, 5, 3, 7) for run in group[start::8]] for group in by_source]
    return [run for turn in itertools.zip_longest(*spread) for run in turn if run is not None]


def _place(run: Run) -> tuple[int, int]:
    return list(SOURCES).index(run.source), run.row


def percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def gib(number: float) -> str:
    return f"{number / 2**30:.2f}"


HEADINGS = ["row", "configuration", "published s", "predicted s", "error", "published GiB", "predicted GiB", "error", "provenance"]  # fmt: skip


def cells_of(compared: Compared) -> list[str]:
    run, predicted = compared.run, compared.predicted
    memory = run.memory
    return [
        str(run.row),
        run.label + (f" ({run.differs})" if run.differs else ""),
        "" if run.step_s is None else f"{run.step_s:.4g}",
        "" if run.step_s is None or predicted.step_s is None else f"{predicted.step_s:.4g}",
        percent(compared.time_error),
        "" if memory is None else f"{gib(memory.bytes)} {memory.metric}",
        "" if memory is None else gib(predicted.memory_bytes[memory.metric]),
        percent(compared.memory_error),
        predicted.confidence,
    ]


def as_json(compared: Compared) -> dict[str, object]:
    run, predicted = compared.run, compared.predicted
    return {
        "row": run.row,
        "source": run.source,
        "half": SOURCES[run.source].half,
        "configuration": run.label,
        "published_s": run.step_s,
        "predicted_s": predicted.step_s if run.step_s is not None else None,
        "published_memory_bytes": run.memory.bytes if run.memory else None,
        "predicted_memory_bytes": predicted.memory_bytes[run.memory.metric] if run.memory else None,
        "known": predicted.confidence,
    }


SUMMARY_HEADINGS = [
    "source",
    "half",
    "rows",
    "time: median",
    "p90",
    "mean",
    "in range",
    "memory: rows",
    "median",
    "p90",
]


def summarize(compared: list[Compared]) -> list[list[str]]:
    """Absolute errors in percent, by source, by half, and of all; the mean is signed."""
    groups: list[tuple[str, str, list[Compared]]] = [
        (name, source.half, [each for each in compared if each.run.source == name]) for name, source in SOURCES.items()
    ]
    for half in ("fit", "judge"):
        groups.append(("all", half, [each for each in compared if SOURCES[each.run.source].half == half]))
    groups.append(("all", "", compared))
    found = []
    for name, half, group in groups:
        if not group:
            continue
        times = np.array([each.time_error for each in group if each.time_error is not None])
        memory = np.array([each.memory_error for each in group if each.memory_error is not None])
        mean = f"{100 * times.mean():+.1f}" if len(times) else ""
        inside = [each.in_range for each in group if each.in_range is not None]
        covered = f"{np.mean(inside):.0%}" if inside else ""
        found.append([name, half, str(len(times)), *_shares(times), mean, covered, str(len(memory)), *_shares(memory)])
    return found


def _shares(errors: np.ndarray) -> list[str]:
    if not len(errors):
        return ["", ""]
    off = 100 * np.abs(errors)
    return [f"{np.median(off):.1f}", f"{np.percentile(off, 90):.1f}"]


def markdown(headings: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def write_page(page: Path, compared: list[Compared], skipped: list[SkippedRow]) -> None:
    """Replaces the tables between the markers, or appends them. The text around them is kept."""
    text = page.read_text() if page.exists() else ""
    made = ["\n" + markdown(SUMMARY_HEADINGS, summarize(compared))]
    for name, source in SOURCES.items():
        group = [each for each in compared if each.run.source == name]
        if not group:
            continue
        made.append(f"\n### {name} ({source.half})\n")
        rows = [[*cells_of(each), each.run.provenance] for each in group]
        made.append(markdown([*HEADINGS, "source"], rows))
    made.append("\n### Skipped rows\n")
    made.append(markdown(["source", "rows", "why"], _reasons(skipped)))
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if rest else "\n"
    page.write_text(before + BEGIN + "\n" + "\n".join(made) + END + after)


def plot(path: Path, compared: list[Compared]) -> None:
    """Predicted against published, with bands of 10 and 20 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, memories) = pyplot.subplots(1, 2, figsize=(11, 5.2))
    for name in SOURCES:
        group = [each for each in compared if each.run.source == name]
        steps = [(each.run.step_s, each.predicted.step_s) for each in group if each.time_error is not None]
        held = [
            (each.run.memory.bytes / 2**30, each.predicted.memory_bytes[each.run.memory.metric] / 2**30)
            for each in group
            if each.run.memory is not None
        ]
        for axes, points in ((times, steps), (memories, held)):
            if points:
                axes.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.7, label=f"{name} ({len(points)})")
    for axes, what in ((times, "step time, s"), (memories, "peak memory, GiB")):
        axes.set(xscale="log", yscale="log", xlabel=f"published {what}", ylabel=f"predicted {what}")
        ends = np.array(axes.get_xlim())
        axes.plot(ends, ends, color="black", linewidth=0.8)
        for band, shade in ((0.2, "0.92"), (0.1, "0.84")):
            axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=shade, zorder=0)
        axes.set_xlim(ends)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.2)
    times.set_title("Bands: 10 and 20 %", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)


def _reasons(skipped: list[SkippedRow]) -> list[list[str]]:
    counts: dict[tuple[str, str], int] = {}
    for each in skipped:
        counts[each.source, each.reason] = counts.get((each.source, each.reason), 0) + 1
    return [[source, str(count), reason] for (source, reason), count in counts.items()]


def print_table(console: Console, title: str, headings: list[str], rows: list[list[str]]) -> None:
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main(
    data: Annotated[Path, typer.Argument(help="Folder with the measurements.")],
    source: Annotated[list[str] | None, typer.Option(help="Only these sources.")] = None,
    rows: Annotated[str, typer.Option(help="Only these rows: 80,81.")] = "",
    traces: Annotated[
        Path | None, typer.Option(help="Where traces are kept. Default: in the temporary folder.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one emulation may take.")] = 1200,
    emulation: Annotated[
        bool, typer.Option(help="Emulate runs that have no trace yet. Otherwise they are skipped.")
    ] = True,
    again: Annotated[bool, typer.Option(help="Emulate all runs again, after a change to Maya itself.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write published and predicted figures here.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Write the tables into this page, between its markers.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw predicted against published to this file.")
    ] = None,
) -> None:
    """Emulates published runs, predicts them and prints the errors."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    folder = traces or Path(tempfile.gettempdir()) / "maya-published-runs"
    folder.mkdir(parents=True, exist_ok=True)
    all_runs, skipped = read(data)
    keys = {run.row: key_of(run) for run in all_runs}
    first: dict[str, Run] = {}  # of runs that are the same to the emulator, one is emulated
    for run in all_runs:
        first.setdefault(keys[run.row], run)
    wanted = {int(number) for number in rows.split(",") if number}
    chosen = [run for run in all_runs if run.source in (source or SOURCES) and run.row in (wanted or keys)]

    compared, failed, fresh = [], list[tuple[Run, str]](), set[Path]()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for run in variety_first(chosen):
            progress.update(task, description=f"row {run.row}: {run.label}")
            place = folder / f"row-{first[keys[run.row]].row}"
            problem = None
            if emulation:
                problem = emulate(run, keys[run.row], place, timeout, again and place not in fresh)
                fresh.add(place)
            elif not place.with_suffix(".run.json").exists():
                progress.advance(task)
                continue
            if problem is None:
                try:
                    compared.append(Compared(run, predict_run(run, place)))
                except MayaError as error:
                    problem = error.problem
            if problem is not None:
                failed.append((run, problem))
                progress.console.print(f"row {run.row} ({run.label}): {problem}")
            progress.advance(task)

    compared.sort(key=lambda each: _place(each.run))
    print_table(
        console, "Published and predicted", ["source", *HEADINGS], [[c.run.source, *cells_of(c)] for c in compared]
    )
    print_table(console, "Errors in percent", SUMMARY_HEADINGS, summarize(compared))
    print_table(console, "Skipped rows", ["source", "rows", "why"], _reasons(skipped))
    if failed:
        print_table(console, "Failed", ["row", "problem"], [[str(run.row), problem] for run, problem in failed])
    if json_file is not None:
        json_file.write_text(json.dumps([as_json(each) for each in compared], indent=1))
    if write is not None:
        write_page(write, compared, skipped)
    if picture is not None:
        plot(picture, compared)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    try:
        typer.run(main)
    except MayaError as error:
        print(error.problem, error.advice, file=sys.stderr)
        raise SystemExit(2) from None
