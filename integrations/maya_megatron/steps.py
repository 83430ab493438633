"""Steps of Megatron's optimizers: they step torch's optimizers inside, one for each kind of parameter, and gather the updated parameters
afterwards, which is part of the step. Megatron's own training loop is stopped after it has logged the step. Checked with
megatron-core 0.16.1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.session.emulation import Emulation

OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")


def install(emulation: Emulation) -> None:
    patches = emulation.device.patches

    def optimizers(module: ModuleType) -> None:
        for name in OPTIMIZERS:
            kind = getattr(module, name)
            patches.set(kind, "step", _one_step(kind.step, emulation))

    def training(module: ModuleType) -> None:
        patches.set(module, "train_step", _stopping(module.train_step, emulation))

    patches.when_imported("megatron.core.optimizer.optimizer", optimizers)
    patches.when_imported("megatron.training.training", training)


def _stopping(original: Callable[..., Any], emulation: Emulation) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        emulation.steps.stop_if_enough()
        emulation.steps.loop_stops = True
        return original(*args, **kwargs)

    return train_step


def _one_step(original: Callable[..., Any], emulation: Emulation) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with emulation.steps.one_step_of(self):
            return original(self, *args, **kwargs)

    return step
