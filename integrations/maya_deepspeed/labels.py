"""Assigns DeepSpeed's memory to categories. For torch's optimizer hooks, a partition of the float32 master weights is a parameter. In
ZeRO's arithmetic (2 bytes of parameters, 2 of gradients, 12 of optimizer state) it is optimizer state, and the flat 16-bit buffers
are the parameters.

The attributes below belong to DeepSpeed's optimizers; each kind of optimizer has some of them. Buckets and gathered weights count as
buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Category, Integration, on_device

# The order matters, because the last label counts: without master weights, a partition of the state is one of the parameters.
HELD = {
    Category.OPTIMIZER_STATE: (
        "single_partition_of_fp32_groups",  # ZeRO 1 and 2
        "fp32_partitioned_groups_flat",  # ZeRO 3
        "fp32_groups_flat_partition",  # BF16_Optimizer
        "fp32_groups_flat",  # FP16_Optimizer
        "fp32_groups",  # FP16_UnfusedOptimizer
    ),
    Category.PARAMETERS: (
        "bit16_groups_flat",
        "fp16_partitioned_groups_flat",
        "bf16_groups_flat",
        "fp16_groups_flat",
        "fp16_groups",
    ),
    Category.GRADIENTS: ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat"),
}
# The buckets of DeepSpeed 0.16, before there was one for each dtype: those of ZeRO 1 and 2, and of ZeRO 3.
BUCKETS_BEFORE = ("ipg_buffer", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer")


def install(integration: Integration) -> None:
    patches = integration.patches

    def engine(module: ModuleType) -> None:
        kind = module.DeepSpeedEngine
        configure = kind._configure_optimizer

        @functools.wraps(configure)
        def _configure_optimizer(self: Any, *args: Any, **kwargs: Any) -> None:
            """Labels early, because a program that runs out of memory may not reach its first step."""
            integration.label(
                on_device(self.module.parameters()), Category.PARAMETERS
            )  # they are about to be flattened
            configure(self, *args, **kwargs)
            state(integration, self)

        patches.set(kind, "_configure_optimizer", _configure_optimizer)
        patches.set(
            kind, "allreduce_gradients", _before(kind.allreduce_gradients, functools.partial(gradients, integration))
        )

    def stage_1_and_2(module: ModuleType) -> None:
        kind = module.DeepSpeedZeroOptimizer
        patches.set(
            kind, "_release_ipg_buffers", _before(kind._release_ipg_buffers, functools.partial(buckets, integration))
        )

    def stage_3(module: ModuleType) -> None:
        kind = module.PartitionedParameterCoordinator
        fetch = kind.fetch_sub_module

        @functools.wraps(fetch)
        def fetch_sub_module(self: Any, current_submodule: torch.nn.Module, forward: bool) -> None:
            fetch(self, current_submodule, forward)
            fetched = [p for p in module.iter_params(current_submodule) if not p.ds_persist]
            integration.label(on_device(p.data for p in fetched), Category.BUFFERS)

        patches.set(kind, "fetch_sub_module", fetch_sub_module)

    patches.when_imported("deepspeed.runtime.engine", engine)
    patches.when_imported("deepspeed.runtime.zero.stage_1_and_2", stage_1_and_2)
    patches.when_imported("deepspeed.runtime.zero.partitioned_param_coordinator", stage_3)


def gradients(integration: Integration, engine: Any) -> None:
    """Labels the gradients after a backward pass."""
    parameters = list(engine.module.parameters()) if engine.module is not None else []
    summed = [getattr(p, "grad_accum", None) for p in parameters]  # used by ZeRO instead of .grad
    integration.label(on_device([*(p.grad for p in parameters), *summed]), Category.GRADIENTS)
    _held(integration, engine.optimizer, Category.GRADIENTS)


def state(integration: Integration, engine: Any) -> None:
    """Labels everything that lasts from step to step."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:  # torch's own optimizer, which the step counter labels
        return
    states = [value for state in inner.state.values() if isinstance(state, dict) for value in state.values()]
    integration.label(on_device(states), Category.OPTIMIZER_STATE)
    for category in HELD:
        _held(integration, optimizer, category)
    parameters = list(engine.module.parameters()) if engine.module is not None else []
    kept = [p.data for p in parameters if getattr(p, "ds_persist", False)]  # too small to be partitioned
    second = [getattr(p, "ds_secondary_tensor", None) for p in parameters]  # ZeRO++: a second partition within the node
    partitions = [getattr(p, "ds_tensor", None) for p in parameters]
    integration.label(on_device([*kept, *second, *partitions]), Category.PARAMETERS)
    buckets(integration, optimizer)


def buckets(integration: Integration, optimizer: Any) -> None:
    held = [one.buffer for one in (getattr(optimizer, "ipg_buckets", None) or {}).values()]
    before = [getattr(optimizer, name, None) for name in BUCKETS_BEFORE]
    integration.label(on_device(_tensors([held, before])), Category.BUFFERS)


def _held(integration: Integration, optimizer: Any, category: Category) -> None:
    tensors = [one for name in HELD[category] for one in _tensors(getattr(optimizer, name, None))]
    integration.label(on_device(tensors), category)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in DeepSpeed's lists of lists and dicts of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _before(original: Callable[..., Any], action: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return original(self, *args, **kwargs)

    return wrapped
