"""Which predicted run an actual run is paired with, also among a thousand runs."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from maya_mlflow import keys
from maya_mlflow.commands import add
from maya_mlflow.compare import drift
from maya_mlflow.pairs import Run, pairs_of
from typer.testing import CliRunner

from maya_core import cli

add(cli.app, cli.calibrate.app)
runner = CliRunner()


def run(name: str, kind: str, started: int, step: float | None = 1.0, **tags: str) -> Run:
    marks = {f"maya.{tag}": value for tag, value in tags.items()}
    metrics = {} if step is None else {keys.STEP_TIME: step}
    return Run(name, name, kind, started, metrics, {}, marks)


def joined(*runs: Run) -> list[tuple[str, str, str]]:
    ordered = sorted(runs, key=lambda one: one.started_ms)
    return [(pair.predicted.name, pair.actual.name, pair.by) for pair in pairs_of(ordered)]


def test_a_fingerprint_joins_and_of_several_predictions_the_newest_before_the_run() -> None:
    old = run("old", "predicted", 1, fingerprint="f")
    new = run("new", "predicted", 2, fingerprint="f")
    late = run("late", "predicted", 9, fingerprint="f")
    other = run("other", "predicted", 3, fingerprint="g")
    actual = run("actual", "actual", 5, fingerprint="f")
    assert joined(old, new, late, other, actual) == [("new", "actual", "fingerprint")]
    assert joined(late, actual) == [("late", "actual", "fingerprint")]
    assert joined(other, actual) == []


def test_a_pair_id_goes_before_a_fingerprint_and_repeated_runs_make_pairs_of_their_own() -> None:
    one = run("one", "predicted", 1, fingerprint="f", pair_id="p")
    two = run("two", "predicted", 2, fingerprint="f", pair_id="q")
    first = run("first", "actual", 3, fingerprint="f", pair_id="p")
    again = run("again", "actual", 4, fingerprint="f", pair_id="nobody's")
    assert joined(one, two, first, again) == [("one", "first", "pair id"), ("two", "again", "fingerprint")]


def test_a_run_that_was_not_timed_makes_no_pair() -> None:
    predicted = run("predicted", "predicted", 1, fingerprint="f", pair_id="p")
    tagged_only = run("the user's own", "actual", 2, None, fingerprint="f", pair_id="p")
    assert joined(predicted, tagged_only) == []


def test_drift_is_of_the_newest_pairs() -> None:
    good = [
        (run(f"p{n}", "predicted", n, 1.0, pair_id=str(n)), run(f"a{n}", "actual", n, 1.01, pair_id=str(n)))
        for n in range(50)
    ]
    bad = [
        (run(f"p{n}", "predicted", n, 1.0, pair_id=str(n)), run(f"a{n}", "actual", n, 1.25, pair_id=str(n)))
        for n in range(50, 60)
    ]
    every = [one for pair in (*good, *bad) for one in pair]
    assert drift(pairs_of(every))[keys.STEP_TIME] == pytest.approx(20.0)
    assert drift(pairs_of(every[:100]))[keys.STEP_TIME] == pytest.approx(100 * (1 - 1 / 1.01))


def test_pairs_of_other_hardware_are_recognized() -> None:
    def on(**parts: str) -> str:
        return json.dumps({"GPU": "h100", "world size": "8", "inputs": "x", **parts})

    predicted = run("predicted", "predicted", 1, pair_id="p", job=on())
    for other, expected in (
        (on(), False),
        (on(inputs="y"), False),
        (on(GPU="a100"), True),
        (on(**{"world size": "4"}), True),
    ):
        (pair,) = pairs_of([predicted, run("actual", "actual", 2, pair_id="p", job=other)])
        assert pair.is_of_other_hardware is expected


def fill(database: Path, experiment: str, pairs: int, actual_gpu: str = "h100", slower: float = 1.0) -> None:
    """Runs as MLflow 3.17 has them in its tables: through its API they would take a minute to make."""
    draw = random.Random(0)
    runs, metrics, tags = [], [], []
    for number in range(pairs):
        step = draw.lognormvariate(-1, 1)
        for kind in ("predicted", "actual"):
            run_id = f"{number:08x}{int(experiment) % 2**32:08x}{'a' if kind == 'actual' else 'b':>016s}".replace(
                " ", "0"
            )
            started = 1_790_000_000_000 + number * 3_600_000 + (kind == "actual")
            runs.append(
                (
                    run_id,
                    f"{kind} {number}",
                    "LOCAL",
                    "",
                    "",
                    "me",
                    "FINISHED",
                    started,
                    started,
                    "",
                    "active",
                    "",
                    experiment,
                )
            )
            off = slower if kind == "actual" else draw.gauss(1, 0.06)
            figures = {
                keys.STEP_TIME: step * off,
                keys.TOKENS: 1e4 / step / off,
                keys.PEAK_ALLOCATED: 2e4 * draw.gauss(1, 0.02),
            }
            figures |= {f"maya/other_{other}": 1.0 for other in range(20)}
            metrics += [(key, value, started, run_id, 0, 0) for key, value in figures.items()]
            marks = {
                keys.KIND: kind,
                keys.FINGERPRINT: f"{experiment}-{number:016x}",
                keys.JOB: json.dumps({"GPU": "h100" if kind == "predicted" else actual_gpu}),
            }
            tags += [(key, value, run_id) for key, value in marks.items()]
    with sqlite3.connect(database, timeout=60) as db:
        columns = "run_uuid, name, source_type, source_name, entry_point_name, user_id, status, start_time, end_time, source_version, lifecycle_stage, artifact_uri, experiment_id"
        db.executemany(f"insert into runs ({columns}) values ({','.join('?' * 13)})", runs)
        for table in ("metrics", "latest_metrics"):
            db.executemany(
                f"insert into {table} (key, value, timestamp, run_uuid, step, is_nan) values (?,?,?,?,?,?)", metrics
            )
        db.executemany("insert into tags (key, value, run_uuid) values (?,?,?)", tags)
    db.close()


def test_a_thousand_pairs_are_compared_with_few_requests(
    uri: str, server_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from mlflow import MlflowClient
    from mlflow.utils import rest_utils

    requests: list[str] = []
    original = rest_utils.http_request

    def counted(host_creds: Any, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        requests.append(endpoint)
        return original(host_creds, endpoint, *args, **kwargs)

    experiment = MlflowClient(uri).create_experiment("a thousand")
    fill(server_folder / "runs.db", experiment, 1000)
    words = [
        "compare",
        "--experiment",
        "a thousand",
        "--tracking-uri",
        uri,
        "--out",
        "thousand",
        "--json",
        "thousand.json",
        "--threshold",
        "10",
    ]
    monkeypatch.setattr(rest_utils, "http_request", counted)
    result = runner.invoke(cli.app, [*words, "--no-log"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "1,000 pairs, the 20 with the largest errors" in " ".join(result.output.split())
    told = json.loads((place / "thousand.json").read_text())["pairs"]
    assert len(told) == 1000
    # 2,000 runs, 500 at a time. MLflow 3.0 offers another page after a full last one, of predictions and of runs.
    pages = 6 if mlflow.__version__.startswith("3.0.") else 4
    assert len([one for one in requests if one.endswith("runs/search")]) == pages
    assert len(requests) < 10, requests


def test_pairs_of_other_hardware_count_neither_for_medians_nor_for_the_exit_code(
    uri: str, server_folder: Path, place: Path
) -> None:
    """The runs took four times as long, on another GPU: with the right one, that would be a drift."""
    from mlflow import MlflowClient

    codes = {}
    for gpu in ("h100", "t4"):
        experiment = MlflowClient(uri).create_experiment(f"on {gpu}")
        fill(server_folder / "runs.db", experiment, 3, gpu, slower=4.0)
        result = runner.invoke(
            cli.app, ["compare", "--experiment", f"on {gpu}", "--tracking-uri", uri, "--out", gpu, "--no-log"]
        )
        codes[gpu] = result.exit_code
    assert codes == {"h100": 4, "t4": 0}
    words = " ".join(result.output.split())
    assert "3 pairs of different hardware count neither for the medians nor for the exit code" in words
    assert "all pairs" not in words
    assert "GPU h100 and t4" in words
