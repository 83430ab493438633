"""What is left out under emulation: checkpoints, monitors, the log of communication. Weights are not computed, so nothing can be kept
of them; and time on this machine says nothing of the GPUs' (log.py tells the predicted one). Checked with deepspeed 0.19."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch.distributed as dist

from maya_core.messages import say as say_line
from maya_core.session.emulation import Emulation


class Saying:
    """One line for each thing left out, from rank 0."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, what: str) -> None:
        silent = dist.is_initialized() and dist.get_rank() != 0
        if what not in self._said and not silent:
            say_line(f"under emulation {what}")
        self._said.add(what)


def install(emulation: Emulation) -> None:
    parts = {
        "deepspeed.runtime.engine": _checkpoints,
        "deepspeed.monitor.monitor": _monitors,
        "deepspeed.utils.comms_logging": _communication_log,
    }
    say = Saying()
    for module, part in parts.items():
        emulation.device.patches.when_imported(module, functools.partial(part, emulation, say))


def _checkpoints(emulation: Emulation, say: Saying, module: ModuleType) -> None:
    patches, engine = emulation.device.patches, module.DeepSpeedEngine

    def save(self: Any, *args: Any, **kwargs: Any) -> bool:
        say("DeepSpeed writes no checkpoints")
        return True

    def load_checkpoint(self: Any, load_dir: str, *args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        say("DeepSpeed reads no checkpoints: training begins where the program begins it")
        return load_dir, {}

    patches.set(engine, "save_checkpoint", save)
    patches.set(engine, "save_16bit_model", save)
    patches.set(engine, "load_checkpoint", load_checkpoint)


def _monitors(emulation: Emulation, say: Saying, module: ModuleType) -> None:
    """Tensorboard, wandb, csv and comet make their files as soon as they are made."""
    master = module.MonitorMaster
    original = master.__init__

    @functools.wraps(original)
    def __init__(self: Any, monitor_config: Any) -> None:
        if monitor_config.enabled:
            say("DeepSpeed's monitors write nothing")
        off = {
            name: getattr(monitor_config, name).model_copy(update={"enabled": False})
            for name in ("tensorboard", "wandb", "csv_monitor", "comet")
        }
        original(self, monitor_config.model_copy(update=off))
        self.enabled = False

    emulation.device.patches.set(master, "__init__", __init__)


def _communication_log(emulation: Emulation, say: Saying, module: ModuleType) -> None:
    patches, logger = emulation.device.patches, module.CommsLogger

    def log_all(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        say("DeepSpeed's log of communication is empty; the prediction has one")
        return {}

    patches.set(logger, "append", lambda self, *args, **kwargs: None)
    patches.set(logger, "log_all", log_all)
