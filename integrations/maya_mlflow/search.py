"""Logs a search to MLflow as one run, with a nested run for each trial."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from maya_core.errors import MayaError
from maya_core.messages import say
from maya_core.search.result import PICTURE
from maya_mlflow import keys
from maya_mlflow.artifacts import server_of
from maya_mlflow.pairs import ask, client

if TYPE_CHECKING:
    from maya_core.search.study import Search, Trial

SEARCH = "search"


def search_logger(experiment: str | None) -> Callable[[Search], None]:
    """A function that logs a finished search."""
    mlflow = client()

    def log(search: Search) -> None:
        try:
            run_id = _log(mlflow, experiment, search)
        except MayaError as error:  # the search itself is on disk
            say(f"the search was not logged: {error.problem} Repeat the same command to log it; no trial runs again.")
            return
        Console().print(f"[dim]MLflow: run {run_id}, {len(search.trials)} nested runs[/dim]", highlight=False)

    return log


def _log(mlflow: Any, experiment: str | None, search: Search) -> str:
    from maya_mlflow.send import experiment_id

    place = ask(experiment_id, mlflow, experiment)
    parent = ask(mlflow.create_run, place, run_name=f"search {search.job.name}", tags={keys.KIND: SEARCH}).info.run_id
    best = search.best()
    params = {"maya/recipe": search.job.name, "maya/points": str(search.job.size)}
    params |= {f"maya/{name}": str(value) for name, value in search.plan.model_dump().items()}
    metrics = {f"maya_search/{how.replace(' ', '_')}": float(count) for how, count in search.counts().items()}
    if best:
        metrics |= _metrics(best[0])
        params |= {f"knob/{name}": str(value) for name, value in best[0].point.items()}
    _batch(mlflow, parent, metrics, params)
    for trial in track(search.trials, "logging trials", console=Console(stderr=True), transient=True):
        _log_trial(mlflow, place, parent, search, trial)
    with server_of(mlflow):
        ask(mlflow.log_text, parent, json.dumps([_row(one) for one in search.trials], indent=1), "trials.json")
        if (picture := search.folder / PICTURE).exists():
            ask(mlflow.log_artifact, parent, str(picture))
    ask(mlflow.set_terminated, parent)
    return str(parent)


def _log_trial(mlflow: Any, place: str, parent: str, search: Search, trial: Trial) -> None:
    tags = {"mlflow.parentRunId": parent, keys.KIND: "trial", "maya.fits": _fits(trial.outcome.status)}
    if trial.broken:
        tags["maya.broken"] = trial.broken
    run_id = ask(mlflow.create_run, place, run_name=f"trial {trial.number}", tags=tags).info.run_id
    _batch(mlflow, run_id, _metrics(trial), {f"knob/{name}": str(value) for name, value in trial.point.items()})
    ask(mlflow.set_terminated, run_id, "FINISHED" if trial.outcome.status != "failed" else "FAILED")


def _fits(status: str) -> str:
    return {"fits": "true", "not known": "unknown"}.get(status, "false")


def _metrics(trial: Trial) -> dict[str, float]:
    found = trial.outcome
    known = {
        keys.STEP_TIME: found.step_time_s,
        keys.TOKENS: found.tokens_per_s,
        keys.SAMPLES: found.samples_per_s,
        keys.COST: found.usd_per_1k_steps,
        "maya/mfu": found.mfu,
        "maya/memory_mb": found.used_bytes / keys.MB if found.used_bytes else None,
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def _batch(mlflow: Any, run_id: str, metrics: dict[str, float], params: dict[str, str]) -> None:
    from mlflow.entities import Metric, Param

    now = int(time.time() * 1000)
    ask(
        mlflow.log_batch,
        run_id,
        metrics=[Metric(name, value, now, 0) for name, value in metrics.items()],
        params=[Param(name, value[:500]) for name, value in params.items()],
    )


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "point": trial.point,
        "broken": trial.broken,
        **trial.outcome.model_dump(mode="json"),
    }
