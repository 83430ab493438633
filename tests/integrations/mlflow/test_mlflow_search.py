"""A search in MLflow: a run, and a nested one for each trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from maya_mlflow import keys
from maya_mlflow.search import search_logger
from mlflow import MlflowClient
from mlflow_here import free_port
from search_here import job, search
from test_search import Computed


def test_a_search_is_a_run_with_a_nested_one_for_each_trial(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    found = search(job(tmp_path), tmp_path / "study", sampler="grid")
    found.run(8, Computed())
    search_logger("searches")(found)
    client = MlflowClient(uri)
    place = client.get_experiment_by_name("searches").experiment_id
    runs = client.search_runs([place])
    (whole,) = [run for run in runs if run.data.tags[keys.KIND] == "search"]
    trials = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == whole.info.run_id]
    assert len(runs) == 1 + len(trials) == 9
    best = found.best()[0]
    assert whole.data.metrics[keys.STEP_TIME] == best.outcome.step_time_s
    assert whole.data.params["knob/micro"] == str(best.point["micro"])
    told = {run.info.run_name: run.data for run in trials}
    for trial in found.trials:
        logged = told[f"trial {trial.number}"]
        assert logged.params == {f"knob/{name}": str(value) for name, value in trial.point.items()}
        assert logged.metrics.get(keys.STEP_TIME) == trial.outcome.step_time_s
        assert logged.tags["maya.fits"] == str(trial.outcome.status == "fits").lower()


def test_a_server_that_is_down_does_not_lose_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    found = search(job(tmp_path), tmp_path / "study", sampler="grid")
    found.run(4, Computed())
    search_logger(None)(found)
    assert "the search was not logged" in capfd.readouterr().err
    assert len(found.trials) == 4
