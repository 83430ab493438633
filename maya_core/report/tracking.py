"""Where predictions are logged, beside the terminal and files: by integrations, which arrive by entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from maya_core.errors import MayaError
from maya_core.report.analysis import Analysis
from maya_core.report.prediction import Prediction

# Entry points: functions that take what the user said of the logging, and give what logs a prediction.
TRACKERS = "maya.trackers"

Tracker = Callable[[Analysis, Prediction], object]


def mlflow_tracker(asked: bool | str, pair_id: str | None = None) -> Tracker | None:
    """What `--mlflow` and `mlflow=` ask for: nothing, MLflow as it is configured, or an experiment of that name."""
    if asked is False:
        return None
    found = entry_points(group=TRACKERS, name="mlflow")
    if not found:
        raise MayaError("Maya's part for MLflow is not installed.", "pip install 'maya-emulator[mlflow]'")
    tracker: Tracker = next(iter(found)).load()(experiment=None if asked is True else asked, pair_id=pair_id)
    return tracker
