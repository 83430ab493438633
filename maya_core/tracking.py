"""Trackers log predictions somewhere beside the terminal and files, an experiment tracker say. They come from other packages, by entry points:

    [project.entry-points."maya.trackers"]
    mlflow = "maya_mlflow.tracking:MlflowTracking"

A tracking class declares the options that it adds to commands and plugins, and makes what logs a prediction or a search.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.fields import FieldInfo

GROUP = "maya.trackers"

LogPrediction = Callable[[Any, Any], object]  # of an Analysis and its Prediction
LogSearch = Callable[[Any], object]  # of a Search


class Tracking(Protocol):
    """What a tracker's package provides. `options` is a pydantic model whose fields carry a `maya_core.request.Option`; the object is
    made from the values that the user gave."""

    options: type[BaseModel]

    def __init__(self, given: Mapping[str, Any]) -> None: ...

    def predictions(self) -> LogPrediction | None:
        """What logs a prediction; None if the user did not ask for it. A wrong option is reported here, before anything runs."""

    def searches(self) -> LogSearch | None:
        """The same for a search that is over."""


@functools.cache
def installed() -> tuple[type[Tracking], ...]:
    return tuple(entry.load() for entry in sorted(entry_points(group=GROUP)))


@functools.cache
def tracker_options() -> dict[str, FieldInfo]:
    """The options that installed trackers add, by name."""
    return {name: field for tracking in installed() for name, field in tracking.options.model_fields.items()}


def prediction_trackers(given: Mapping[str, Any]) -> list[LogPrediction]:
    """What the user asked to have predictions logged by."""
    return [tracker for tracking in _made(given) if (tracker := tracking.predictions()) is not None]


def search_trackers(given: Mapping[str, Any]) -> list[LogSearch]:
    return [tracker for tracking in _made(given) if (tracker := tracking.searches()) is not None]


def _made(given: Mapping[str, Any]) -> list[Tracking]:
    made = []
    for tracking in installed():
        own = {name: value for name, value in given.items() if name in tracking.options.model_fields}
        made.append(tracking(own))
    return made
