"""Switches experiment trackers to the mode in which they do nothing, whatever the program asks of them. Their objects exist, so that the program
runs on: `wandb.run.name`, `experiment.log_metric(...)`.

What trackers write to the disk (TensorBoard's event files, Aim's repository, offline runs) goes to the overlay of files anyway. Their environment
variables are set as well, for children of the program.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import Integration

# The switches of trackers by environment variable.
VARIABLES = {
    "WANDB_MODE": "disabled",
    "COMET_AUTO_LOG_DISABLE": "1",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
}
COMET = ("Experiment", "ExistingExperiment", "OfflineExperiment", "ExistingOfflineExperiment")
NEPTUNE = ("Run", "Model", "ModelVersion", "Project")


def install(integration: Integration) -> None:
    patches = integration.patches
    for name, value in VARIABLES.items():
        patches.put(os.environ, name, value)
    patches.when_imported("wandb", functools.partial(_wandb, integration))
    patches.when_imported("comet_ml", functools.partial(_comet, integration))
    patches.when_imported("neptune", functools.partial(_neptune, integration))
    patches.when_imported("clearml", functools.partial(_clearml, integration))
    patches.when_imported("aim", functools.partial(_aim, integration))
    patches.when_imported("swanlab", functools.partial(_swanlab, integration))
    patches.when_imported("torch.utils.tensorboard.writer", functools.partial(_tensorboard, integration))


def _told(integration: Integration, tracker: str) -> None:
    integration.skip(f"what the program logs to {tracker} is not sent, because its losses are made up")


def _with(integration: Integration, tracker: str, **forced: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function or a constructor that is called with these arguments, whatever the program gives."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            _told(integration, tracker)
            return original(*args, **{**kwargs, **forced})

        return call

    return wrap


def _wandb(integration: Integration, wandb: ModuleType) -> None:
    patches = integration.patches
    patches.require(wandb, "init", _with(integration, "Weights & Biases", mode="disabled")(wandb.init))
    patches.set(wandb, "login", lambda *args, **kwargs: True)  # it would ask the server, or the user


def _comet(integration: Integration, comet: ModuleType) -> None:
    for name in COMET:
        patches_of(integration, getattr(comet, name), "Comet", disabled=True)
    integration.patches.set(comet, "login", lambda *args, **kwargs: None)

    def start(*args: Any, **kwargs: Any) -> Any:
        return comet.Experiment(api_key="emulated")

    integration.patches.set(comet, "start", start)


def _neptune(integration: Integration, neptune: ModuleType) -> None:
    for name in NEPTUNE:
        patches_of(integration, getattr(neptune, name), "Neptune", mode="debug")


def patches_of(integration: Integration, kind: type, tracker: str, **forced: Any) -> None:
    """Replaces a class's constructor."""
    integration.patches.wrap(kind, "__init__", _with(integration, tracker, **forced))


def _clearml(integration: Integration, clearml: ModuleType) -> None:
    init = clearml.Task.init

    def offline(*args: Any, **kwargs: Any) -> Any:
        _told(integration, "ClearML")
        clearml.Task.set_offline(True)
        return init(*args, **kwargs)

    integration.patches.set(clearml.Task, "init", offline)


def _aim(integration: Integration, aim: ModuleType) -> None:
    def local(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if "://" in str(kwargs.get("repo") or os.environ.get("AIM_REPO", "")):
                _told(integration, "Aim")
                kwargs["repo"] = tempfile.mkdtemp(prefix="maya-aim-")
            original(self, *args, **kwargs)

        return init

    integration.patches.wrap(aim.Run, "__init__", local)


def _swanlab(integration: Integration, swanlab: ModuleType) -> None:
    integration.patches.set(swanlab, "init", _with(integration, "SwanLab", mode="disabled")(swanlab.init))
    integration.patches.set(swanlab, "login", lambda *args, **kwargs: None)


def _tensorboard(integration: Integration, module: ModuleType) -> None:
    """Event files in a folder of this machine are covered by the overlay; other places are reached over the network."""

    def local(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(self: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
            if "://" in str(log_dir or ""):
                _told(integration, "TensorBoard")
                log_dir = tempfile.mkdtemp(prefix="maya-tensorboard-")
            original(self, log_dir, *args, **kwargs)

        return init

    integration.patches.wrap(module.SummaryWriter, "__init__", local)
