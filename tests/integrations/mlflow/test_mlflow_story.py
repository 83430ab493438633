"""Predict, train for real, compare, calibrate, predict again: against a real MLflow server, with trainings on this machine's CPU."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from maya_mlflow import keys, recorder
from maya_mlflow.commands import DRIFTED, add
from maya_mlflow.predicted import PredictedRuns
from maya_mlflow.recorder import record_actual
from mlflow_here import EXAMPLE, SIZES, example, one_thread, predicted
from typer.testing import CliRunner

from maya_core import cli
from maya_core.errors import MayaError
from maya_core.predictor.calibration import load_calibration
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import read_prediction

EXPERIMENT = "story"
MAYA = str(Path(sys.executable).parent / "maya")

add(cli.app, cli.calibrate.app)
runner = CliRunner()


@dataclass
class Story:
    uri: str
    command: subprocess.CompletedProcess[str]  # `maya run --mlflow` of the first size
    predictions: list[Prediction]
    predicted_ids: list[str]
    actual_ids: list[str]
    actual: list[dict[str, float]]


@pytest.fixture(scope="module")
def story(uri: str, place: Path, sent_here: None) -> Story:
    """Every size predicted and trained: the first by the command, the others in this process."""
    first = [part for name, value in SIZES[0].items() for part in (f"--{name}", str(value))]
    command = subprocess.run(
        [MAYA, "run", "--gpu", "one-core", "--out", "out", "--mlflow", "--mlflow-experiment", EXPERIMENT, "--", "python", str(EXAMPLE), *first],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert command.returncode == 0, command.stderr
    predictions = [read_prediction(place / "out" / "latest" / "prediction.json")]
    predicted_ids = [re.search(r"/runs/(\w{32})", command.stdout)[1]]  # type: ignore[index]
    log = PredictedRuns(experiment=EXPERIMENT, tracking_uri=uri)
    for size in SIZES[1:]:
        analysis, prediction = predicted(size)
        sent = log(analysis, prediction)
        assert sent is not None
        predictions.append(prediction)
        predicted_ids.append(sent.run_id)
    actual_ids, actual = [], []
    with one_thread():
        for size in SIZES:
            with record_actual(gpu="one-core", experiment=EXPERIMENT, tracking_uri=uri, steps=12) as record:
                example().train(**size, steps=15)
            assert record.sent is not None
            actual_ids.append(record.sent.run_id)
            actual.append(record.metrics)
    return Story(uri, command, predictions, predicted_ids, actual_ids, actual)


def rest(uri: str, question: str, **query: str) -> dict[str, Any]:
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    with urllib.request.urlopen(f"{uri}/api/2.0/mlflow/{question}?{asked}", timeout=30) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def run_of(uri: str, run_id: str) -> tuple[dict[str, Any], dict[str, float], dict[str, str], dict[str, str]]:
    run = rest(uri, "runs/get", run_id=run_id)["run"]
    data = run["data"]
    metrics = {one["key"]: float(one["value"]) for one in data["metrics"]}
    return run["info"], metrics, *({one["key"]: one["value"] for one in data[kind]} for kind in ("params", "tags"))  # type: ignore[return-value]


def maya(story: Story, *words: str) -> Any:
    return runner.invoke(cli.app, [*words, "--tracking-uri", story.uri])


def test_a_predicted_run_has_every_figure_of_the_prediction(story: Story) -> None:
    info, metrics, params, tags = run_of(story.uri, story.predicted_ids[0])
    prediction = story.predictions[0]
    gpu = prediction.memory.ranks[0]
    assert info["status"] == "FINISHED" and info["lifecycle_stage"] == "active"
    assert prediction.energy is not None and prediction.cost is not None and prediction.confidence is not None
    expected = {
        "maya/step_time_s": prediction.step_time_s,
        "maya/samples_per_s": prediction.samples_per_s,
        "maya/tokens_per_s": prediction.tokens_per_s,
        "maya/mfu": prediction.mfu,
        "maya/peak_allocated_mb": gpu.peak_allocated_bytes / 1e6,
        "maya/peak_reserved_mb": gpu.peak_reserved_bytes / 1e6,
        "maya_predicted/exposed_communication_s": 0.0,
        "maya/usd_per_1k_steps": prediction.cost.usd_per_1k_steps,
        "maya/usd_per_epoch": prediction.cost.usd_per_epoch,
        "maya/kwh_per_1k_steps": prediction.energy.kwh_per_1k_steps,
        "maya_predicted/confidence_extrapolated": prediction.confidence.extrapolated,
        "system/gpu_0_memory_usage_megabytes": (gpu.peak_reserved_bytes + gpu.outside_allocator_bytes) / 1e6,
        "system/gpu_0_power_usage_watts": prediction.energy.average_w_per_gpu,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert params["maya/gpu"] == "one-core" and params["maya/inputs"] == "4x32 int64"
    assert params["maya/precision"] == "float32" and params["maya/world_size"] == "1"
    assert params["maya/command"].startswith("python") and "--width 64" in params["maya/command"]
    assert tags["maya.run_kind"] == "predicted" and tags["maya.fits"] == "true"
    exported = re.search(r"export MAYA_PAIR_ID=(\w+) MAYA_FINGERPRINT=(\w+)", story.command.stdout)
    assert exported is not None
    assert (tags["maya.pair_id"], tags["maya.fingerprint"]) == exported.groups()


def test_its_artifacts_are_those_of_the_report_and_the_trace(story: Story) -> None:
    def files(path: str = "") -> set[str]:
        query = {"run_id": story.predicted_ids[0]} | ({"path": path} if path else {})
        found = rest(story.uri, "artifacts/list", **query).get("files", [])
        return {one["path"] for one in found if not one["is_dir"]}.union(
            *(files(one["path"]) for one in found if one["is_dir"])
        )

    assert files() == {
        "prediction.json", "report.html", "timeline.json.gz", "memory_snapshot.pickle", "trace/job.json",
        "trace/rank-00000.trace", "figures/step.png", "figures/memory.png",
    }  # fmt: skip


def test_nothing_is_left_on_disk_once_it_is_sent(story: Story, place: Path) -> None:
    assert not (place / "maya-mlflow").exists()


def test_an_actual_run_has_the_same_keys_and_fingerprint(story: Story) -> None:
    for predicted_id, actual_id, measured in zip(story.predicted_ids, story.actual_ids, story.actual, strict=True):
        info, metrics, params, tags = run_of(story.uri, actual_id)
        _, foretold, told, marks = run_of(story.uri, predicted_id)
        assert tags["maya.run_kind"] == "actual" and info["status"] == "FINISHED"
        assert tags["maya.fingerprint"] == marks["maya.fingerprint"]
        assert "maya.pair_id" not in tags
        assert (
            metrics["maya/step_time_s"] == pytest.approx(measured["maya/step_time_s"])
            and metrics["maya/steps_timed"] == 12
        )
        assert {
            "maya/step_time_s",
            "maya/samples_per_s",
            "maya/tokens_per_s",
            "maya/usd_per_1k_steps",
        } <= metrics.keys() & foretold.keys()
        # Of the same step: as many samples and tokens as were predicted.
        for name in ("samples", "tokens"):
            assert metrics[f"maya/{name}_per_s"] * metrics["maya/step_time_s"] == pytest.approx(
                foretold[f"maya/{name}_per_s"] * foretold["maya/step_time_s"]
            )
        assert all(
            params[name] == told[name] for name in ("maya/inputs", "maya/parameters", "maya/precision", "maya/gpu")
        )
    assert len({run_of(story.uri, one)[3]["maya.fingerprint"] for one in story.actual_ids}) == len(SIZES)


def test_the_recorded_step_is_what_a_clock_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder against a clock of the test's own, on a loop that sleeps: 3 steps to warm up, slower, are left out."""
    import time

    import torch

    monkeypatch.setattr(recorder, "upload_or_keep", lambda draft, folder: None)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with record_actual(steps=8, warm_up=3) as record:
        for step in range(11):
            time.sleep(0.2 if step < 3 else 0.02)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert 0.02 <= record.metrics["maya/step_time_s"] < 0.1
    assert record.metrics["maya/steps_timed"] == 8
    assert record.metrics["maya/samples_per_s"] * record.metrics["maya/step_time_s"] == pytest.approx(2)


def test_compare_tables_the_pairs_draws_them_and_logs_the_errors(story: Story, place: Path) -> None:
    result = maya(
        story, "compare", "--experiment", EXPERIMENT, "--out", "figures", "--json", "errors.json", "--threshold", "inf"
    )
    assert result.exit_code == 0, result.output
    assert f"{len(SIZES)} pairs" in result.output and "error of step" in " ".join(result.output.split())
    told = json.loads((place / "errors.json").read_text())["pairs"]
    assert [(pair["predicted"], pair["actual"]) for pair in told] == list(
        zip(story.predicted_ids, story.actual_ids, strict=True)
    )
    for pair, prediction, measured in zip(told, story.predictions, story.actual, strict=True):
        assert pair["paired_by"] == "fingerprint" and pair["differences"] == []
        expected = 100 * (prediction.step_time_s / measured["maya/step_time_s"] - 1)  # type: ignore[operator]
        assert pair["error_pct"]["step_time_s"] == pytest.approx(expected)
        for run_id in (pair["predicted"], pair["actual"]):
            info, metrics, _, _ = run_of(story.uri, run_id)
            assert metrics["error/step_time_s_pct"] == pytest.approx(expected)
            assert info["status"] == "FINISHED"
    for name in ("predicted_vs_actual.png", "errors.png"):
        assert (place / "figures" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_drift_makes_it_exit_with_another_code(story: Story) -> None:
    result = maya(story, "compare", story.predicted_ids[0], story.actual_ids[0], "--threshold", "0.001", "--no-log")
    assert result.exit_code == DRIFTED
    assert "The median error of this pair is larger than 0.001 %: step time" in " ".join(result.output.split())


def test_figures_of_others_are_not_overwritten(story: Story, tmp_path: Path) -> None:
    (tmp_path / "errors.png").write_bytes(b"mine")
    result = maya(story, "compare", "--experiment", EXPERIMENT, "--out", str(tmp_path))
    assert isinstance(result.exception, MayaError) and "will not be overwritten" in result.exception.problem
    assert (tmp_path / "errors.png").read_bytes() == b"mine"


def test_an_experiment_that_is_not_there_is_named_with_those_that_are(story: Story) -> None:
    result = maya(story, "compare", "--experiment", "stroy")
    assert isinstance(result.exception, MayaError)
    assert "no experiment 'stroy'" in result.exception.problem and f"'{EXPERIMENT}'" in result.exception.advice


def test_runs_that_are_not_the_same_job_say_in_what_they_differ(story: Story) -> None:
    result = maya(story, "compare", story.predicted_ids[0], story.actual_ids[1], "--no-log", "--threshold", "inf")
    said = " ".join(result.output.split())
    assert "are not the same job" in said and "inputs 4x32 int64 and 4x64 int64" in said


def test_a_pair_id_goes_before_the_fingerprint(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the command prints join a run to that very prediction, whatever its job is."""
    tags = run_of(story.uri, story.predicted_ids[3])[3]
    monkeypatch.setenv("MAYA_PAIR_ID", tags["maya.pair_id"])
    with one_thread(), record_actual(gpu="one-core", experiment="paired", tracking_uri=story.uri, steps=2) as record:
        example().train(**SIZES[0], steps=5)
    assert record.sent is not None
    from maya_mlflow.pairs import pairs_of
    from maya_mlflow.pairs import run_of as read
    from mlflow import MlflowClient

    client = MlflowClient(story.uri)
    runs = [read(client.get_run(one)) for one in [*story.predicted_ids, record.sent.run_id]]
    (pair,) = pairs_of(runs)
    assert pair.by == "pair id" and pair.predicted.run_id == story.predicted_ids[3]
    assert pair.actual.tags[keys.FINGERPRINT] != pair.predicted.tags[keys.FINGERPRINT]


@pytest.fixture(scope="module")
def calibrated(story: Story, place: Path) -> Iterator[str]:
    """`maya calibrate --from-mlflow`; what it printed."""
    result = maya(story, "calibrate", "--from-mlflow", EXPERIMENT)
    assert result.exit_code == 0, (result.output, result.exception)
    yield " ".join(result.output.split())
    (place / "profiles" / "one-core-runs.json").unlink()


def test_calibrated_predictions_are_closer_and_name_the_runs(story: Story, calibrated: str) -> None:
    found = load_calibration("one-core")
    assert found is not None and found.runs is not None and found.runs.runs == len(SIZES)
    assert found.runs.after_pct < 0.7 * found.runs.before_pct
    assert f"{found.runs.before_pct:.1f} % before and {found.runs.after_pct:.1f} % after" in calibrated
    before, after = [], []
    for size, prediction, measured in zip(SIZES, story.predictions, story.actual, strict=True):
        again = predicted(size)[1]
        assert again.assumptions.calibration == "one-core-runs"
        assert again.assumptions.calibrated_by.startswith(f"{len(SIZES)} runs of 'story' (")
        assert "fitted to 4 runs of 'story'" in " ".join(str(again).split())
        before.append(abs(prediction.step_time_s / measured["maya/step_time_s"] - 1))  # type: ignore[operator]
        after.append(abs(again.step_time_s / measured["maya/step_time_s"] - 1))  # type: ignore[operator]
    assert statistics.median(after) < 0.5 * statistics.median(before)


def test_a_fit_does_not_build_on_an_earlier_one(story: Story, calibrated: str, uri: str) -> None:
    """Predictions made with the calibration are logged too: fitted again, the factors are the same, not the rest of them."""
    first = load_calibration("one-core")
    log = PredictedRuns(experiment=EXPERIMENT, tracking_uri=uri)
    for size in SIZES:
        analysis, prediction = predicted(size)
        assert prediction.assumptions.calibration
        log(analysis, prediction)
    result = maya(story, "calibrate", "--from-mlflow", EXPERIMENT, "--name", "again")
    assert result.exit_code == 0, result.exception
    again = load_calibration("one-core", "again")
    assert first is not None and again is not None
    assert again.runs == first.runs
    runner.invoke(cli.app, ["calibrate", "remove", "again"])


def test_a_calibration_is_not_written_over_unasked(story: Story, calibrated: str) -> None:
    result = maya(story, "calibrate", "--from-mlflow", EXPERIMENT)
    assert (
        isinstance(result.exception, MayaError)
        and "a calibration 'one-core-runs' already exists" in result.exception.problem
    )
