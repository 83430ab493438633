"""Counts the steps of a DeepSpeed engine. ZeRO steps the optimizer in parts, and once before training, with zero gradients, to create
its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import Integration
from maya_deepspeed import labels

OPTIMIZERS = {
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
}


def install(integration: Integration) -> None:
    patches, steps = integration.patches, integration.steps

    def engine(module: ModuleType) -> None:
        step = module.DeepSpeedEngine._take_model_step

        @functools.wraps(step)
        def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> None:
            with steps.one_step_of(self):
                labels.gradients(integration, self)
                step(self, *args, **kwargs)
                labels.state(
                    integration, self
                )  # corrects the labels of the step counter, which took the inner optimizers for the program's

        patches.set(module.DeepSpeedEngine, "_take_model_step", _take_model_step)

    def optimizer(name: str, module: ModuleType) -> None:
        kind = getattr(module, name)
        patches.set(kind, "initialize_optimizer_states", _not_counted(kind.initialize_optimizer_states, integration))

    patches.when_imported("deepspeed.runtime.engine", engine)
    for module, name in OPTIMIZERS.items():
        patches.when_imported(module, functools.partial(optimizer, name))


def _not_counted(original: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_optimizer_states(self: Any, *args: Any, **kwargs: Any) -> Any:
        with integration.steps.aside():
            return original(self, *args, **kwargs)

    return initialize_optimizer_states
