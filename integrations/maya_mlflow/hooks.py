"""Redirects what the program logs to MLflow under emulation to a temporary folder. Losses are constants and times are those of this
machine, so they must not reach the user's experiments."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from types import ModuleType
from typing import Any

from maya_core.integration import Integration
from maya_core.messages import say

TRACKING = "mlflow.tracking._tracking_service.registry"
MODELS = "mlflow.tracking._model_registry.registry"
ARTIFACTS = "mlflow.tracking._tracking_service.utils"
FLUENT = "mlflow.tracking.fluent"


def install(integration: Integration) -> None:
    integration.patches.supports("mlflow")
    stores = TemporaryStores(integration)
    integration.patches.when_imported(TRACKING, stores.take_runs)
    integration.patches.when_imported(MODELS, stores.take_models)
    integration.patches.when_imported(ARTIFACTS, stores.take_artifacts)
    # An experiment that is set under emulation belongs to the temporary store.
    integration.patches.keep(os.environ, "MLFLOW_EXPERIMENT_ID")
    integration.patches.when_imported(
        FLUENT, lambda module: integration.patches.keep(vars(module), "_active_experiment_id")
    )


class TemporaryStores:
    """The temporary stores and their folder. They are created on first use."""

    def __init__(self, integration: Integration) -> None:
        self._integration = integration
        self._stores: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def take_runs(self, module: ModuleType) -> None:
        patches = self._integration.patches
        before = _active()
        patches.on_undo(functools.partial(self._forget, before))
        store = functools.partial(self._store, "runs")
        patches.require(module.TrackingStoreRegistry, "get_store", lambda registry, *_, **__: store())

    def take_artifacts(self, module: ModuleType) -> None:
        """Clears MLflow's cache of artifact locations during the emulation, and restores it afterwards."""
        places, before = module._artifact_repos_cache, module._artifact_repos_cache.copy()

        def put_back() -> None:
            places.clear()
            places.update(before)

        self._integration.patches.on_undo(put_back)
        places.clear()

    def take_models(self, module: ModuleType) -> None:
        store = functools.partial(self._store, "models")
        registry = module.ModelRegistryStoreRegistry
        self._integration.patches.require(registry, "get_store", lambda registry, *_, **__: store())

    def _store(self, kind: str) -> Any:
        if self._folder is None:
            if self._integration.rank in (None, 0):
                say("under emulation, what the program logs to MLflow is not sent, because its losses are constants")
            self._folder = tempfile.TemporaryDirectory(prefix="maya-mlflow-", ignore_cleanup_errors=True)
        if kind not in self._stores:
            self._stores[kind] = _create(kind, f"{self._folder.name}/{kind}")
        return self._stores[kind]

    def _forget(self, before: set[str]) -> None:
        """Forgets runs that started in the temporary store, because the real store does not know them."""
        for runs in _stacks():
            runs[:] = [run for run in runs if run.info.run_id in before]
        self._stores.clear()
        if self._folder is not None:
            self._folder.cleanup()


def _stacks() -> list[list[Any]]:
    fluent: Any = sys.modules.get("mlflow.tracking.fluent")
    stack = getattr(fluent, "_active_run_stack", None)
    return list(stack.get_all_thread_values().values()) if stack is not None else []


def _active() -> set[str]:
    return {run.info.run_id for runs in _stacks() for run in runs}


def _create(kind: str, folder: str) -> Any:
    # A file store, because creating a database takes seconds. MLflow requires a variable that allows it.
    from mlflow import environment_variables as variables

    allow = getattr(variables, "MLFLOW_ALLOW_FILE_STORE", None)
    before = allow.get_raw() if allow is not None else None
    with contextlib.ExitStack() as stack:
        if allow is not None:
            allow.set(True)
            stack.callback(allow.unset if before is None else functools.partial(allow.set, before))
        if kind == "models":
            from mlflow.store.model_registry.file_store import FileStore as ModelStore

            return ModelStore(folder)
        return _run_store(folder)


def _run_store(folder: str) -> Any:
    import pathlib

    from mlflow.store.tracking.file_store import FileStore

    class AcceptingStore(FileStore):
        """Creates unknown runs and experiments as empty ones, because they exist on the user's server."""

        def _find_run_root(self, run_uuid: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            found = super()._find_run_root(run_uuid, *args, **kwargs)
            if found[1] is None:
                fluent: Any = sys.modules.get("mlflow.tracking.fluent")
                experiment = getattr(fluent, "_active_experiment_id", None) or self.DEFAULT_EXPERIMENT_ID
                made = self.create_run(experiment, "", 0, [], "emulated").info.run_id
                _, there = super()._find_run_root(made, *args, **kwargs)
                meta = pathlib.Path(there, self.META_DATA_FILE_NAME)
                meta.write_text(meta.read_text().replace(made, run_uuid))
                os.rename(there, pathlib.Path(there).with_name(run_uuid))
                found = super()._find_run_root(run_uuid, *args, **kwargs)
            return found

        def _get_experiment_path(self, experiment_id: Any, *args: Any, **kwargs: Any) -> Any:
            found = super()._get_experiment_path(experiment_id, *args, **kwargs)
            if found is None and experiment_id is not None:
                self._create_experiment_with_id(f"emulated {experiment_id}", str(experiment_id), None, None)
                found = super()._get_experiment_path(experiment_id, *args, **kwargs)
            return found

    return AcceptingStore(folder, folder)
