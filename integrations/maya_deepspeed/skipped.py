"""Skips checkpoints, monitors and the communication log under emulation. Weights are not computed, so they cannot be saved, and times
on this machine are not those of the GPUs (log.py prints predicted ones)."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    parts = {
        "deepspeed.runtime.engine": _checkpoints,
        "deepspeed.monitor.monitor": _monitors,
        "deepspeed.utils.comms_logging": _communication_log,
    }
    for module, part in parts.items():
        integration.patches.when_imported(module, functools.partial(part, integration))


def _checkpoints(integration: Integration, module: ModuleType) -> None:
    patches, engine = integration.patches, module.DeepSpeedEngine

    def save(self: Any, *args: Any, **kwargs: Any) -> bool:
        integration.skip("DeepSpeed writes no checkpoints")
        return True

    def load_checkpoint(self: Any, load_dir: str, *args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        integration.skip("DeepSpeed reads no checkpoints: training starts from the beginning")
        return load_dir, {}

    patches.set(engine, "save_checkpoint", save)
    patches.set(engine, "save_16bit_model", save)
    patches.set(engine, "load_checkpoint", load_checkpoint)


def _monitors(integration: Integration, module: ModuleType) -> None:
    """Disables Tensorboard, wandb, csv and comet, which create files as soon as they are constructed."""
    master = module.MonitorMaster
    original = master.__init__

    @functools.wraps(original)
    def __init__(self: Any, monitor_config: Any) -> None:
        if monitor_config.enabled:
            integration.skip("DeepSpeed's monitors write nothing")
        off = {
            name: getattr(monitor_config, name).model_copy(update={"enabled": False})
            for name in ("tensorboard", "wandb", "csv_monitor", "comet")
        }
        original(self, monitor_config.model_copy(update=off))
        self.enabled = False

    integration.patches.set(master, "__init__", __init__)


def _communication_log(integration: Integration, module: ModuleType) -> None:
    patches, logger = integration.patches, module.CommsLogger

    def log_all(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        integration.skip("DeepSpeed's communication log is empty; the prediction contains a table of communication")
        return {}

    patches.set(logger, "append", lambda self, *args, **kwargs: None)
    patches.set(logger, "log_all", log_all)
