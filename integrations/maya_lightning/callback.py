"""The callback that every Trainer gets through Lightning's `callbacks_factory` entry points. It does nothing unless Maya is in use."""

from __future__ import annotations

import sys
from typing import Any


def for_lightning() -> list[Any]:
    return _callbacks("lightning.pytorch.callbacks.callback")


def for_pytorch_lightning() -> list[Any]:
    return _callbacks("pytorch_lightning.callbacks.callback")


def _callbacks(module: str) -> list[Any]:
    if "maya_lightning.plugin" not in sys.modules:  # nothing was emulated in this process
        return []
    base = sys.modules[module].Callback
    return [type("MayaRules", (EmulationCallback, base), {})()]


class EmulationCallback:
    """Checks the plugin, and lets schedulers work without metrics of validation."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        from maya_core.errors import MayaError
        from maya_lightning.plugin import MayaEmulator

        emulator = trainer._accelerator_connector.cluster_environment
        if isinstance(emulator, MayaEmulator) and emulator.session.integration is None:
            raise MayaError(
                "the emulation of this MayaEmulator had already ended when the Trainer was created.",
                "Create a new one for every Trainer: Trainer(plugins=[MayaEmulator(...)]).",
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from maya_core.integration import emulating

        if emulating() and trainer.strategy.root_device.type == "cuda":
            for scheduler in trainer.lr_scheduler_configs:
                scheduler.strict = False  # ReduceLROnPlateau of a validation loss
