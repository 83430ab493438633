"""Logs a prediction to MLflow as a predicted run. All commands and plugins use it."""

from __future__ import annotations

import os
import shlex
import uuid
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from maya_core.messages import say
from maya_core.report.analysis import Analysis
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import write_prediction
from maya_core.trace.job import trace_path, write_manifest
from maya_core.trace.rank import write_trace
from maya_mlflow import draft as drafts
from maya_mlflow import keys
from maya_mlflow.context import PAIR_VARIABLE, checked_pair
from maya_mlflow.draft import ARTIFACTS, Draft
from maya_mlflow.fingerprint import predicted_job
from maya_mlflow.upload import Sent, configured, require_mlflow, upload_or_keep


@dataclass(frozen=True)
class PredictedRuns:
    """Logs predictions: `maya run --mlflow`, `MayaEmulator(mlflow=...)` and others call it with each.

    Experiment and server are MLflow's own configuration unless given. `pair_id` pairs the prediction with a real run, even if their
    fingerprints differ; `parent_run_id` nests it below another run.
    """

    experiment: str | None = None
    tracking_uri: str | None = None
    pair_id: str | None = None
    parent_run_id: str | None = None

    def __post_init__(self) -> None:
        require_mlflow()
        checked_pair(self.pair_id)

    def __call__(self, analysis: Analysis, prediction: Prediction) -> Sent | None:
        """Writes the run to disk, then sends it. If that fails, the run stays on disk with a message; the prediction never fails."""
        pair = self.pair_id or os.environ.get(PAIR_VARIABLE) or uuid.uuid4().hex[:12]
        job = predicted_job(prediction)
        params = keys.job_params(job) | keys.predicted_params(prediction)
        if analysis.job.command:
            program, *rest = analysis.job.command
            params["maya/command"] = shlex.join([Path(program).name, *rest])
        where = configured(self.tracking_uri, self.experiment)
        draft = Draft(
            kind="predicted",
            name=_name(prediction),
            parent_run_id=self.parent_run_id,
            metrics=keys.predicted_metrics(prediction),
            params=params,
            tags=keys.predicted_tags(prediction, job, pair),
            tracking_uri=where.tracking_uri,
            experiment=where.experiment,
            experiment_id=where.experiment_id,
        )
        try:
            folder = drafts.new_folder(draft)
            write_artifacts(analysis, prediction, folder / ARTIFACTS)
            drafts.write(draft, folder)
        except OSError as error:
            say(f"the predicted run was not logged: it could not be written to disk ({error})")
            return None
        sent = upload_or_keep(draft, folder)
        _report(draft, sent)
        return sent


def write_artifacts(analysis: Analysis, prediction: Prediction, folder: Path) -> None:
    """Prediction, page, timeline and memory snapshot as `maya report` writes them, and the trace, which `maya what-if` and
    `maya calibrate --from-mlflow` need."""
    from maya_core.files import rank_paths
    from maya_core.report.html import write_page
    from maya_core.report.snapshot import write_snapshot
    from maya_core.report.timeline_file import write_trace as write_timeline

    write_prediction(folder / "prediction.json", prediction)
    write_page(analysis, prediction, folder / "report.html")
    ranks = analysis.job.ranks
    for rank, path in rank_paths(folder / "memory_snapshot.pickle", list(ranks)).items():
        write_snapshot(ranks[rank], path)
    if analysis.timeline is not None:
        list(write_timeline(analysis, folder / "timeline.json.gz", None))
    (folder / "trace").mkdir()
    for rank, trace in ranks.items():
        write_trace(trace_path(folder / "trace", rank), trace)
    write_manifest(folder / "trace", analysis.job)


def _name(prediction: Prediction) -> str:
    world = prediction.world
    return f"predicted {world.size} x {prediction.cluster.gpu}"


def _report(draft: Draft, sent: Sent | None) -> None:
    console = Console()
    if sent is not None:
        console.print(Text(f"MLflow: {sent.address}", style="dim"), soft_wrap=True)
    exports = [f"{PAIR_VARIABLE}={draft.tags[keys.PAIR]}"]
    if fingerprint := draft.tags.get(keys.FINGERPRINT):
        exports.append(f"MAYA_FINGERPRINT={fingerprint}")
    console.print(
        Text(f"To pair the real run with this prediction, start it after:  export {' '.join(exports)}", style="dim"),
        soft_wrap=True,
    )
