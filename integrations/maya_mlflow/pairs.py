"""Reads the runs of an experiment, and finds the predicted run for each actual one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from maya_core.errors import MayaError
from maya_mlflow import keys
from maya_mlflow.draft import without_password
from maya_mlflow.fingerprint import HARDWARE, differences

PAGE = 500  # runs per request, so that a server answers in time


@dataclass(frozen=True)
class Run:
    run_id: str
    name: str
    kind: str
    started_ms: int
    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


@dataclass(frozen=True)
class Pair:
    predicted: Run
    actual: Run
    by: str  # 'pair id', 'fingerprint', or 'given'

    def errors(self) -> dict[str, float]:
        """The error of the prediction by metric, in percent of the actual value."""
        mine, real = self.predicted.metrics, self.actual.metrics
        return {
            key: 100 * (mine[key] - real[key]) / real[key]
            for key in keys.COMPARED
            if key in mine and real.get(key, 0.0) > 0
        }

    def differences(self) -> list[str]:
        """How the two jobs differ, in words."""
        return differences(*self._parts())

    @property
    def is_of_other_hardware(self) -> bool:
        """Whether the two runs were on different hardware, so that the error says nothing about the prediction."""
        mine, real = self._parts()
        return bool(differences(*({name: each[name] for name in HARDWARE if name in each} for each in (mine, real))))

    def _parts(self) -> list[dict[str, str]]:
        return [json.loads(run.tags.get(keys.JOB, "{}")) for run in (self.predicted, self.actual)]


def client(uri: str | None = None) -> Any:
    """MLflow's client, with short timeouts unless the user has set others."""
    from maya_mlflow.upload import WAIT, require_mlflow

    require_mlflow()
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{WAIT:.0f}")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    return MlflowClient(uri)


def ask(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls MLflow. A failure becomes a MayaError with a short reason."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    try:
        return call(*args, **kwargs)
    except (MlflowException, RequestException) as error:
        import mlflow

        from maya_mlflow.send import reason_of

        raise MayaError(
            f"MLflow at {without_password(mlflow.get_tracking_uri())} failed to answer: {reason_of(error)}",
            "Check that the server runs, and that MLFLOW_TRACKING_URI and its credentials are correct.",
        ) from error


def run_of(found: Any) -> Run:
    info, data = found.info, found.data
    return Run(
        info.run_id, info.run_name or info.run_id, data.tags.get(keys.KIND, ""), info.start_time or 0,
        dict(data.metrics), dict(data.params), dict(data.tags),
    )  # fmt: skip


def find_experiment(mlflow_client: Any, name: str | None) -> Any:
    """The experiment with this name or id; None means the one that MLflow's configuration names, otherwise Maya's default."""
    from maya_mlflow.send import EXPERIMENT

    wanted = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID") or EXPERIMENT
    found = ask(mlflow_client.get_experiment_by_name, wanted)
    if found is None and wanted.isdigit():
        found = ask(mlflow_client.get_experiment, wanted)
    if found is None:
        known = ", ".join(f"'{each.name}'" for each in ask(mlflow_client.search_experiments, max_results=20))
        raise MayaError(
            f"there is no experiment '{wanted}'.", f"The experiments are: {known or 'none'}. Give --experiment NAME."
        )
    return found


def runs_of(mlflow_client: Any, experiment_id: str) -> list[Run]:
    """All of Maya's runs in an experiment, oldest first."""
    found: list[Run] = []
    for kind in ("predicted", "actual"):
        token = None
        while True:
            page = ask(
                mlflow_client.search_runs,
                [experiment_id],
                filter_string=f"tags.`{keys.KIND}` = '{kind}'",
                max_results=PAGE,
                page_token=token,
            )
            found += [run_of(one) for one in page]
            token = page.token
            if not token:
                break
    return sorted(found, key=lambda run: (run.started_ms, run.run_id))


def pairs_of(runs: list[Run]) -> list[Pair]:
    """Pairs each timed actual run with the prediction that has its pair id, otherwise with the one that has its fingerprint.

    Of several predictions, the newest one before the run is used; if all are newer than the run, the first.
    """
    by_pair: dict[str, list[Run]] = {}
    by_fingerprint: dict[str, list[Run]] = {}
    for run in (run for run in runs if run.kind == "predicted"):
        by_pair.setdefault(run.tags.get(keys.PAIR, ""), []).append(run)
        by_fingerprint.setdefault(run.tags.get(keys.FINGERPRINT, ""), []).append(run)
    found = []
    for actual in (run for run in runs if run.kind == "actual" and keys.STEP_TIME in run.metrics):
        for by, tag, known in (
            ("pair id", keys.PAIR, by_pair),
            ("fingerprint", keys.FINGERPRINT, by_fingerprint),
        ):
            mark = actual.tags.get(tag)
            if mark and (candidates := known.get(mark)):
                earlier = [run for run in candidates if run.started_ms <= actual.started_ms]
                found.append(Pair(earlier[-1] if earlier else candidates[0], actual, by))
                break
    return found
