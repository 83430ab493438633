"""What changes in Lightning while an emulation is on. Checked with lightning, pytorch-lightning and fabric 2.6.

Two places decide everything: the connector, where a Trainer or a Fabric turns its arguments into devices and ranks (connect.py),
and `Trainer.fit` (fit.py). Callbacks that write, stop or show wall-clock time keep quiet.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

from maya_core.integration import Integration
from maya_core.patches import Patches

# Each distribution has its own class trees: (Trainer's package, Fabric's package).
DISTRIBUTIONS = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")

# Callbacks that save, look for metrics of a validation that is skipped, search by trial, or tell the emulator's own time.
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
        patches.when_imported(f"{trainer}.trainer.trainer", functools.partial(_fit, integration))
        for module, name in QUIET.items():
            patches.when_imported(f"{trainer}.{module}", functools.partial(_hush, patches, name))
        patches.when_imported(f"{fabric}.plugins.environments.cluster_environment", _take_as_environment)


def _connect(integration: Integration, name: str, module: ModuleType) -> None:
    from maya_lightning import connect

    connect.install(integration, name, module)


def _fit(integration: Integration, module: ModuleType) -> None:
    from maya_lightning import fit

    fit.install(integration, module)


def _fabric_run(integration: Integration, module: ModuleType) -> None:
    from maya_lightning import connect

    connect.install_command(integration, module)


def _no_weights(integration: Integration, module: ModuleType) -> None:
    """Saved into memory first, and from there to the file: torch.save alone does not see it."""
    original = module._atomic_save

    @functools.wraps(original)
    def save(checkpoint: Any, filepath: Any) -> None:
        if not integration.checkpoints.holds_emulated(checkpoint):
            return original(checkpoint, filepath)
        integration.checkpoints.skip("Lightning writes no weights", filepath)

    integration.patches.set(module, "_atomic_save", save)


def _fabric(integration: Integration, module: ModuleType) -> None:
    """Logs are not written, nor are weights that were trained; to gather them would only be in the time of a step."""
    patches, original = integration.patches, module.Fabric.save

    @functools.wraps(original)
    def save(self: Any, path: Any, state: Any, filter: Any = None) -> None:
        if not integration.steps.begun:  # made by the program, and perhaps read again
            return original(self, path, state, filter)
        integration.checkpoints.skip("fabric.save writes nothing", path, all_ranks=True)

    patches.set(module.Fabric, "save", save)
    for name in ("log", "log_dict"):
        patches.set(module.Fabric, name, _nothing)


def _hush(patches: Patches, name: str, module: ModuleType) -> None:
    """The callback stays where the program expects it, and does nothing in the loop."""
    kind = getattr(module, name)
    hooks = {hook for base in kind.__mro__ if _own(base) for hook in vars(base) if hook.startswith("on_")}
    if name == "SaveConfigCallback":  # which writes as soon as it is set up
        hooks.add("setup")
    for hook in sorted(hooks - {"on_save_checkpoint", "on_load_checkpoint"}):
        patches.set(kind, hook, _nothing)


def _own(kind: type) -> bool:
    """Not the base of all callbacks, whose hooks do nothing."""
    return kind.__module__.rpartition(".")[2] != "callback" and kind is not object


def _nothing(*_: object, **__: object) -> None:
    return None


def _take_as_environment(module: ModuleType) -> None:
    from maya_lightning.plugin import take_as_environment

    take_as_environment(module)
