"""Sends a draft to MLflow: `python -m maya_mlflow.send FOLDER`, in a process of its own (upload.py explains why). It reports its
progress as lines of JSON."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from maya_mlflow import keys
from maya_mlflow.artifacts import server_of
from maya_mlflow.draft import ARTIFACTS, ELSEWHERE, RUN, Draft, read, without_password

EXPERIMENT = "maya"  # the default
LARGEST = 200_000_000  # bytes of an artifact
LONGEST = 300  # characters of a reason
PARAMS = 100  # MLflow's limit for a request

Report = Callable[[dict[str, object]], None]


def send(folder: Path, report: Report, uri: str | None = None, elsewhere: bool = False) -> None:
    """Creates the run, or continues the one that an earlier attempt created."""
    from mlflow import MlflowClient

    draft = read(folder)
    if elsewhere:
        draft = draft.model_copy(update={"experiment_id": None, "parent_run_id": None})
    with _alone(folder):
        client = MlflowClient(uri or draft.tracking_uri)
        report({"ready": client.tracking_uri})
        run = _run(client, draft)
        report({"run": run.info.run_id})
        run_id = run.info.run_id
        if run.data.tags.get(keys.COMPLETE) != "complete":
            _log(client, run_id, draft)
            report({"logged": len(draft.metrics)})
            with server_of(client):
                for name in _send_artifacts(client, run_id, draft, folder / ARTIFACTS):
                    report({"file": name})
            if draft.run_id is None:
                client.set_tag(run_id, keys.COMPLETE, "complete")
                client.set_terminated(run_id, draft.status, draft.ended_ms)
    report({"done": run_id, "experiment": run.info.experiment_id, "uri": without_password(client.tracking_uri)})


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Locks the folder: two uploads at a time would create two runs."""
    with (folder / RUN).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(client: Any, draft: Draft) -> Any:
    if draft.run_id is not None:
        return client.get_run(draft.run_id)
    experiment = draft.experiment_id or experiment_id(client, draft.experiment)
    mine = f"tags.`{keys.UPLOAD}` = '{draft.upload_id}'"
    if found := client.search_runs([experiment], filter_string=mine, max_results=1):
        return found[0]
    tags = dict(draft.tags) | {keys.UPLOAD: draft.upload_id}
    if draft.parent_run_id is not None:
        tags["mlflow.parentRunId"] = draft.parent_run_id
    return client.create_run(experiment, start_time=draft.started_ms, tags=tags, run_name=draft.name)


def experiment_id(client: Any, name: str | None) -> str:
    """The id of the experiment with this name, which is created if necessary; without a name, as MLflow is configured."""
    if name is None:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    from mlflow.exceptions import MlflowException

    try:
        return str(client.create_experiment(name))
    except MlflowException:
        if found := client.get_experiment_by_name(name):  # another process was faster
            return str(found.experiment_id)
        raise


def _log(client: Any, run_id: str, draft: Draft) -> None:
    from mlflow.entities import Metric, Param, RunTag

    # With the time of the draft, so that sending it again does not add a second point.
    metrics = [Metric(name, value, draft.ended_ms, 0) for name, value in draft.metrics.items()]
    params = [Param(name, value[:500]) for name, value in draft.params.items()]
    tags = [RunTag(name, value) for name, value in draft.tags.items()] if draft.run_id is not None else []
    client.log_batch(run_id, metrics=metrics, params=params[:PARAMS], tags=tags)


def _send_artifacts(client: Any, run_id: str, draft: Draft, folder: Path) -> Iterator[str]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.stat().st_size > LARGEST:
            yield f"{path.name} was skipped, because it is larger than {LARGEST / 1e6:.0f} MB"
            continue
        within = path.relative_to(folder).parent.as_posix()
        client.log_artifact(run_id, str(path), None if within == "." else within)
        yield path.name
    prediction = folder / "prediction.json"
    if draft.kind == "predicted" and prediction.is_file():
        from maya_core.report.prediction_file import read_prediction
        from maya_mlflow import figures

        for name, figure in figures.of_prediction(read_prediction(prediction)).items():
            client.log_figure(run_id, figure, f"figures/{name}.png")
            yield f"{name}.png"


def reason_of(error: Exception) -> str:
    """The reason of an error in one line. For a failed connection, only the message of the operating system."""
    text = " ".join(str(error).split())
    if found := re.search(r"\[Errno -?\d+\] ([^'\")]+)", text):
        return found[1]
    return text[:LONGEST] or type(error).__name__


def _print(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        send(folder, _print, os.environ.get("MLFLOW_TRACKING_URI") or None, ELSEWHERE in sys.argv)
    except (
        Exception
    ) as error:  # whatever MLflow and its plugins raise; the parent prints it, and the log contains the traceback
        import traceback

        traceback.print_exc()
        _print({"error": reason_of(error)})
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
