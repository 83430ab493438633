"""Runs of an experiment, and which predicted run each actual one belongs to."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from maya_core.errors import MayaError
from maya_mlflow import keys
from maya_mlflow.draft import without_password
from maya_mlflow.fingerprint import differences

PAGE = 500  # runs to a request: what a server answers within the seconds that it is given


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
        """By metric: the prediction above the actual run, in percent of the latter."""
        mine, real = self.predicted.metrics, self.actual.metrics
        return {
            key: 100 * (mine[key] - real[key]) / real[key]
            for key in keys.COMPARED
            if key in mine and real.get(key, 0.0) > 0
        }

    def differences(self) -> list[str]:
        """In what the two jobs are not the same."""
        told = [json.loads(run.tags.get(keys.JOB, "{}")) for run in (self.predicted, self.actual)]
        return differences(*told)


def client(uri: str | None = None) -> Any:
    """MLflow's, with bounds on how long a server is asked, unless the user has set others."""
    from maya_mlflow.upload import WAIT, require_mlflow

    require_mlflow()
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{WAIT:.0f}")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    return MlflowClient(uri)


def ask(call: Any, *args: Any, **kwargs: Any) -> Any:
    """A question to MLflow; what goes wrong is said in a sentence."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    try:
        return call(*args, **kwargs)
    except (MlflowException, RequestException) as error:
        import mlflow

        from maya_mlflow.send import reason_of

        raise MayaError(
            f"MLflow at {without_password(mlflow.get_tracking_uri())} did not answer as hoped: {reason_of(error)}",
            "Is the server up, and are MLFLOW_TRACKING_URI and its credentials those of the runs?",
        ) from error


def run_of(found: Any) -> Run:
    info, data = found.info, found.data
    return Run(
        info.run_id, info.run_name or info.run_id, data.tags.get(keys.KIND, ""), info.start_time or 0,
        dict(data.metrics), dict(data.params), dict(data.tags),
    )  # fmt: skip


def find_experiment(mlflow_client: Any, name: str | None) -> Any:
    """By name or id; None stands for MLflow's own configuration, else for Maya's."""
    from maya_mlflow.send import EXPERIMENT

    wanted = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID") or EXPERIMENT
    found = ask(mlflow_client.get_experiment_by_name, wanted)
    if found is None and wanted.isdigit():
        found = ask(mlflow_client.get_experiment, wanted)
    if found is None:
        known = ", ".join(f"'{each.name}'" for each in ask(mlflow_client.search_experiments, max_results=20))
        raise MayaError(f"there is no experiment '{wanted}'.", f"There are: {known or 'none'}. Give --experiment NAME.")
    return found


def runs_of(mlflow_client: Any, experiment_id: str) -> list[Run]:
    """All of Maya's in an experiment, oldest first."""
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
    """Each actual run that was timed, with its prediction: the one of its pair id, else the one of its fingerprint. Of several that is
    the newest made before the run, or if all were made after it, the first."""
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
