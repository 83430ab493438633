"""Registers MLflow as a tracker: its options for commands and plugins, and the loggers that they select."""

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
        """False: log nothing. True: log to the experiment that MLflow's configuration names. Otherwise the name of one."""
        chosen = self._given.mlflow_experiment if self._given.mlflow_experiment is not None else self._given.mlflow
        if isinstance(chosen, str) and chosen.lower() in ("1", "true", "0", "false"):  # from an environment variable
            return chosen.lower() in ("1", "true")
        if isinstance(chosen, str) and not chosen.strip():
            raise MayaError(
                "an MLflow experiment needs a name.", "Give one, or set MLFLOW_EXPERIMENT_NAME and use --mlflow."
            )
        return chosen

    def predictions(self) -> LogPrediction | None:
        chosen = self._experiment
        if chosen is False:
            return None
        from maya_mlflow.predicted import PredictedRuns

        return PredictedRuns(experiment=None if chosen is True else chosen, pair_id=self._given.pair)

    def searches(self) -> LogSearch | None:
        chosen = self._experiment
        if chosen is False:
            return None
        from maya_mlflow.search import search_logger

        return search_logger(None if chosen is True else chosen)
