"""Skips what an emulated run does not need: checkpoints, loggers, which would show the times of the emulation, and binding a process to
the processors near its GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from maya_core.integration import Integration
from maya_core.messages import say

WRITERS = ("_set_tensorboard_writer", "_set_wandb_writer", "_set_one_logger")


def install(integration: Integration) -> None:
    patches = integration.patches

    def training(module: ModuleType) -> None:
        patches.set(module, "save_checkpoint", _nothing)
        patches.set(module, "load_checkpoint", _not_loaded)

    def writers(module: ModuleType) -> None:
        for name in WRITERS:
            if hasattr(module, name):
                patches.set(module, name, _nothing)

    def pipeline(module: ModuleType) -> None:
        if hasattr(module, "set_ideal_affinity_for_current_gpu"):
            patches.set(module, "set_ideal_affinity_for_current_gpu", _nothing)

    patches.when_imported("megatron.core.pipeline_parallel.utils", pipeline)
    patches.when_imported("megatron.training.training", training)
    patches.when_imported("megatron.training.global_vars", writers)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _not_loaded(*_: Any, **__: Any) -> tuple[int, int]:
    """The result of a missing checkpoint: iteration 0, and no floating-point operations so far."""
    say("the checkpoint given with --load is not read: an emulated run starts at iteration 0, without weights")
    return 0, 0
