"""Implements `maya calibrate --from-mlflow`: makes a calibration from the pairs of an experiment. The fit itself is in run_factors.py."""

from __future__ import annotations

import datetime
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.host_costs import Host
from maya_core.pipeline import recorded_cluster
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION
from maya_core.predictor.calibration import (
    CLASSES,
    Calibration,
    Origin,
    RunFactors,
    calibrations,
    path_of,
    read_calibration,
    shipped_digest,
    write_calibration,
)
from maya_core.report import wording
from maya_core.request import PredictionOptions
from maya_core.trace.job import read_job
from maya_mlflow import keys, pairs
from maya_mlflow.artifacts import server_of
from maya_mlflow.pairs import Pair, ask
from maya_mlflow.run_factors import FactorCase, fit

FAR = 3.0  # a factor beyond this, or below its inverse, probably means that the runs used another machine


def calibrate(experiment: str, uri: str | None, gpu: str | None, name: str | None, add: bool, replace: bool) -> Path:
    """Fits the factors, prints how much they help, and writes the calibration."""
    console = Console()
    if add and replace:
        raise MayaError("--add and --replace do not work together.", "Give one of them.")
    client = pairs.client(uri)
    found = pairs.find_experiment(client, experiment)
    every = pairs.pairs_of(pairs.runs_of(client, found.experiment_id))
    jobs, chosen = _jobs(every, find_gpu(gpu).name if gpu is not None else None, found.name)
    target = name or f"{chosen}-runs"
    older = _older(target, chosen, add, replace)
    with tempfile.TemporaryDirectory(prefix="maya-") as folder:
        with server_of(client):
            cases, skipped = _cases(client, jobs, Path(folder))
        for reason in skipped:
            console.print(f"  [dim]skipped:[/dim] {reason}", highlight=False, soft_wrap=True)
        factors = fit(cases, found.name, older)
    console.print(_table(cases, factors))
    _report(console, factors)
    made = _calibration(target, chosen, found.name, factors, older)
    path = write_calibration(made, replace=add or replace)
    console.print(f"Written: {path}. Predictions for {chosen} use it from now on.", highlight=False, soft_wrap=True)
    if others := [each.name for each in calibrations(chosen) if each.name != target]:
        console.print(
            f"[yellow]These older calibrations are not used any more: {', '.join(others)}.[/yellow]", soft_wrap=True
        )
    return path


def _jobs(every: list[Pair], gpu: str | None, experiment: str) -> tuple[list[list[Pair]], str]:
    """The pairs of one GPU, grouped by job, and the GPU. Pairs whose runs belong to different jobs are ignored."""
    same = [pair for pair in every if not pair.differences()]
    gpus = sorted({pair.predicted.params.get("maya/gpu", "") for pair in same})
    if gpu is None and len(gpus) > 1:
        raise MayaError(
            f"experiment '{experiment}' has runs on several GPUs: {', '.join(gpus)}.", "Choose one with --gpu."
        )
    chosen = gpu or (gpus[0] if gpus else "")
    jobs: dict[str, list[Pair]] = {}
    for pair in same:
        if pair.predicted.params.get("maya/gpu") == chosen:
            jobs.setdefault(pair.predicted.tags.get(keys.FINGERPRINT) or pair.predicted.run_id, []).append(pair)
    if not jobs and (other := [pair for pair in every if pair.is_of_other_hardware]):
        first = other[0]
        raise MayaError(
            f"experiment '{experiment}' has only pairs of different hardware: {first.predicted.name} and {first.actual.name} differ in "
            f"{'; '.join(first.differences())}.",
            "Factors from them would describe the other hardware. Predict the job on the hardware that it ran on: `maya run --gpu ...`.",
        )
    if not jobs:
        of = f" on {gpu}" if gpu else ""
        raise MayaError(
            f"experiment '{experiment}' has no pairs of a prediction and an actual run{of}.",
            "`maya compare` lists the pairs.",
        )
    return list(jobs.values()), find_gpu(chosen).name


def _older(name: str, gpu: str, add: bool, replace: bool) -> Calibration | None:
    """The calibration to add to: its kernel measurements are kept, and the factors are fitted on top of them."""
    path = path_of(name)
    if not path.exists():
        return None
    if not add and not replace:
        raise MayaError(
            f"a calibration '{name}' already exists ({path}).",
            "Give --replace to overwrite it, --add to keep its kernel measurements, or --name for a new one.",
        )
    found = read_calibration(path)
    if found is None or found.gpu != gpu:
        raise MayaError(f"'{name}' is not a calibration of {gpu}.", "Give another --name.")
    return found if add else None


def _cases(client: Any, jobs: list[list[Pair]], folder: Path) -> tuple[list[FactorCase], list[str]]:
    cases, skipped = [], []
    for number, job_pairs in enumerate(jobs):
        newest = job_pairs[-1].predicted
        where = folder / str(number)
        where.mkdir()
        names = {one.path for one in ask(client.list_artifacts, newest.run_id)}
        if "trace" not in names:
            skipped.append(f"{newest.name} {newest.run_id[:8]}, because its trace is not among its artifacts")
            continue
        job = read_job(ask(client.download_artifacts, newest.run_id, "trace", str(where)))
        options = PredictionOptions(
            host=Host(newest.params.get("maya/host", Host.MODELLED.value)),
            attention=newest.params.get("maya/attention", DEFAULT_ATTENTION),
        )
        actual = statistics.median(pair.actual.metrics[keys.STEP_TIME] for pair in job_pairs)
        cases.append(FactorCase(f"{newest.name} {newest.run_id[:8]}", job, recorded_cluster(job), options, actual))
    return cases, skipped


def _table(cases: list[FactorCase], factors: RunFactors) -> Table:
    import numpy as np

    table = Table()
    for title in ("run", "actual", "predicted before", "error", "after", "error"):
        table.add_column(title, justify="left" if title == "run" else "right")
    logs = np.log([getattr(factors, name) for name in CLASSES])
    for case in cases:
        row = [case.name, wording.seconds(case.actual_s)]
        for at in (np.zeros(len(CLASSES)), logs):
            step = case.step_s(at)
            row += [wording.seconds(step), f"{100 * (step / case.actual_s - 1):+.1f} %"]
        table.add_row(*row)
    return table


def _report(console: Console, factors: RunFactors) -> None:
    console.print(f"Fitted to {factors}.", highlight=False, soft_wrap=True)
    console.print(
        f"The median error of step time is {factors.before_pct:.1f} % before and {factors.after_pct:.1f} % after, each run predicted from the others.",
        highlight=False,
        soft_wrap=True,
    )
    shared = [group for group in factors.fitted if "+" in group]
    if shared:
        console.print(f"Too few runs distinguish these, so they share a factor: {'; '.join(shared)}.", highlight=False)
    if far := [name for name in CLASSES if not 1 / FAR <= getattr(factors, name) <= FAR]:
        console.print(
            f"[yellow]{', '.join(far)}: the factor is larger than {FAR:g}. Did these runs really use this GPU?[/yellow]",
            soft_wrap=True,
        )


def _calibration(name: str, gpu: str, experiment: str, factors: RunFactors, older: Calibration | None) -> Calibration:
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    source = Origin(kind="mlflow", name=experiment, note=f"{factors.runs} runs")
    if older is not None:
        sources = [each for each in older.sources if each.kind != "mlflow"] + [source]
        return older.model_copy(update={"runs": factors, "sources": sources, "created": now})
    return Calibration(name=name, gpu=gpu, created=now, shipped=shipped_digest(), sources=[source], runs=factors)
