"""MLflow as a tracker: the options that it adds to commands and plugins, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from maya_core.errors import MayaError
from maya_core.request import Option
from maya_core.tracking import LogPrediction, LogSearch


class MlflowOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mlflow: Annotated[
        bool | str,
        Option(
            "Log to MLflow, with MLflow's own configuration. In Python, the name of an experiment is possible, too."
        ),
    ] = False
    mlflow_experiment: Annotated[str | None, Option("Log to MLflow, in this experiment.", metavar="NAME")] = None
    pair: Annotated[
        str | None,
        Option(
            "A name that the real run will have, too (MAYA_PAIR_ID). `maya compare` pairs runs by it.", metavar="ID"
        ),
    ] = None


class MlflowTracking:
    """The entry point `mlflow` of the group maya.trackers."""

    options: type[BaseModel] = MlflowOptions

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = MlflowOptions(**given)

    @property
    def _experiment(self) -> bool | str:
        """False: nothing is logged. True: in the experiment that MLflow's configuration names."""
        asked = self._given.mlflow_experiment if self._given.mlflow_experiment is not None else self._given.mlflow
        if isinstance(asked, str) and asked.lower() in ("1", "true", "0", "false"):  # of an environment variable
            return asked.lower() in ("1", "true")
        if isinstance(asked, str) and not asked.strip():
            raise MayaError(
                "an MLflow experiment needs a name.", "Give one, or set MLFLOW_EXPERIMENT_NAME and use --mlflow."
            )
        return asked

    def predictions(self) -> LogPrediction | None:
        asked = self._experiment
        if asked is False:
            return None
        from maya_mlflow.predicted import PredictedRuns

        return PredictedRuns(experiment=None if asked is True else asked, pair_id=self._given.pair)

    def searches(self) -> LogSearch | None:
        asked = self._experiment
        if asked is False:
            return None
        from maya_mlflow.search import search_logger

        return search_logger(None if asked is True else asked)
