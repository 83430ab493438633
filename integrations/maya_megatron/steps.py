"""Counts the steps of Megatron's optimizers. They step torch's optimizers inside, one for each kind of parameter, and gather the updated
parameters afterwards, which is part of the step. Megatron's own training loop is stopped after it has logged the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import Integration
from maya_megatron.validation import ScriptsEvaluation

OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")


def install(integration: Integration) -> None:
    patches = integration.patches

    def optimizers(module: ModuleType) -> None:
        for name in OPTIMIZERS:
            kind = getattr(module, name)
            patches.set(kind, "step", _one_step(kind.step, integration))

    def training(module: ModuleType) -> None:
        evaluation = ScriptsEvaluation(integration)
        evaluation.install(module)
        patches.set(module, "train_step", _stopping(module.train_step, integration, evaluation))

    patches.when_imported("megatron.core.optimizer.optimizer", optimizers)
    patches.when_imported("megatron.training.training", training)


def _stopping(
    original: Callable[..., Any], integration: Integration, evaluation: ScriptsEvaluation
) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if integration.steps.enough:
            evaluation.run()
        integration.steps.stop_if_enough()
        integration.steps.loop_stops = True
        return original(*args, **kwargs)

    return train_step


def _one_step(original: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with integration.steps.one_step_of(self):
            return original(self, *args, **kwargs)

    return step
