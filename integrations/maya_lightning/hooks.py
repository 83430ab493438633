"""Installs the patches of Lightning for an emulation.

The two main ones are in other files: the connector, where a Trainer or a Fabric turns its arguments into devices and ranks
(connect.py), and `Trainer.fit` (fit.py). Callbacks that write files, stop the training or show wall-clock time do nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

from maya_core.integration import Integration
from maya_core.patches import Patches
from maya_lightning.validation import TrainersValidation, epoch_loop, evaluation_loop, fit_loop

# Each distribution has its own class trees: (Trainer's package, Fabric's package).
DISTRIBUTIONS = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")

# Callbacks that save, act on made-up metrics, try out settings, or show the time of the emulation.
QUIET = {
    "callbacks.model_checkpoint": "ModelCheckpoint",
    "callbacks.on_exception_checkpoint": "OnExceptionCheckpoint",
    "callbacks.early_stopping": "EarlyStopping",
    "callbacks.throughput_monitor": "ThroughputMonitor",
    "callbacks.timer": "Timer",
    "callbacks.lr_finder": "LearningRateFinder",
    "callbacks.batch_size_finder": "BatchSizeFinder",
    "callbacks.progress.tqdm_progress": "TQDMProgressBar",
    "callbacks.progress.rich_progress": "RichProgressBar",
    "cli": "SaveConfigCallback",
}


def install(integration: Integration) -> None:
    patches = integration.patches
    for project in ("lightning", "pytorch-lightning"):
        patches.supports(project)
    for package in PACKAGES:
        if spec := importlib.util.find_spec(package):
            integration.not_the_program(*(spec.submodule_search_locations or ()))
    for trainer, fabric in DISTRIBUTIONS:
        connectors = {
            f"{trainer}.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
            f"{fabric}.connector": "_Connector",
        }
        for module, name in connectors.items():
            patches.when_imported(module, functools.partial(_connect, integration, name))
        patches.when_imported(f"{fabric}.cli", functools.partial(_fabric_run, integration))
        patches.when_imported(f"{fabric}.plugins.io.torch_io", functools.partial(_no_weights, integration))
        patches.when_imported(f"{fabric}.fabric", functools.partial(_fabric, integration))
        _trainer(integration, trainer)
        for module, name in QUIET.items():
            patches.when_imported(f"{trainer}.{module}", functools.partial(_silence, patches, name))
        patches.when_imported(f"{fabric}.plugins.environments.cluster_environment", _take_as_environment)


def _connect(integration: Integration, name: str, module: ModuleType) -> None:
    from maya_lightning import connect

    connect.install(integration, name, module)


def _trainer(integration: Integration, package: str) -> None:
    """The Trainer's `fit`, and the loops in which it validates."""
    validation = TrainersValidation(integration)
    parts = {
        "trainer.trainer": _fit,
        "loops.fit_loop": fit_loop,
        "loops.training_epoch_loop": epoch_loop,
        "loops.evaluation_loop": evaluation_loop,
    }
    for name, part in parts.items():
        integration.patches.when_imported(f"{package}.{name}", functools.partial(part, validation, integration))


def _fit(validation: TrainersValidation, integration: Integration, module: ModuleType) -> None:
    from maya_lightning import fit

    fit.install(integration, validation, module)


def _fabric_run(integration: Integration, module: ModuleType) -> None:
    from maya_lightning import connect

    connect.install_command(integration, module)


def _no_weights(integration: Integration, module: ModuleType) -> None:
    """Skips writing weights. Lightning saves to memory first and then to the file, so patching torch.save is not enough."""
    original = module._atomic_save

    @functools.wraps(original)
    def save(checkpoint: Any, filepath: Any) -> None:
        if not integration.checkpoints.holds_emulated(checkpoint):
            return original(checkpoint, filepath)
        integration.checkpoints.skip("Lightning writes no weights", filepath)

    integration.patches.set(module, "_atomic_save", save)


def _fabric(integration: Integration, module: ModuleType) -> None:
    """Skips logs and trained weights. Gathering the weights would only add to the time of a step."""
    patches, original = integration.patches, module.Fabric.save

    @functools.wraps(original)
    def save(self: Any, path: Any, state: Any, filter: Any = None) -> None:
        if not integration.steps.begun:  # created by the program, and possibly read again
            return original(self, path, state, filter)
        integration.checkpoints.skip("fabric.save writes nothing", path, all_ranks=True)

    patches.set(module.Fabric, "save", save)
    for name in ("log", "log_dict"):
        patches.set(module.Fabric, name, _nothing)


def _silence(patches: Patches, name: str, module: ModuleType) -> None:
    """Makes all hooks of a callback do nothing. The callback itself stays where the program expects it."""
    kind = getattr(module, name)
    hooks = {hook for base in kind.__mro__ if _own(base) for hook in vars(base) if hook.startswith("on_")}
    if name == "SaveConfigCallback":  # it writes during setup
        hooks.add("setup")
    for hook in sorted(hooks - {"on_save_checkpoint", "on_load_checkpoint"}):
        patches.set(kind, hook, _nothing)


def _own(kind: type) -> bool:
    """Whether a class defines hooks that do something: not the base class of all callbacks."""
    return kind.__module__.rpartition(".")[2] != "callback" and kind is not object


def _nothing(*_: object, **__: object) -> None:
    return None


def _take_as_environment(module: ModuleType) -> None:
    from maya_lightning.plugin import take_as_environment

    take_as_environment(module)
