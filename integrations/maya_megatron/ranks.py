"""Which ranks Megatron needs, and what they tell one another while it starts. The stages of this rank's pipeline will exchange messages with it:
they are started together, as soon as it is known which they are, and not one after the other as messages turn up. Names of groups of parameters are gathered from all ranks, for checkpoints: ranks that
share a model have the same, so each takes its own for everybody's, and no rank is emulated for that. Checked with megatron-core 0.16.1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration
from maya_core.patches import Patches


def install(integration: Integration) -> None:
    patches = integration.patches

    def optimizer(module: ModuleType) -> None:
        patches.set(module, "_get_param_groups", _alone(module._get_param_groups))

    def pipeline(module: ModuleType) -> None:
        original = module.initialize_model_parallel

        @functools.wraps(original)
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if torch.distributed.get_backend() == "nccl":
                stages = torch.distributed.get_process_group_ranks(module.get_pipeline_model_parallel_group())
                for rank in stages:
                    if rank != torch.distributed.get_rank():
                        integration.needs_rank(rank)

        patches.set(module, "initialize_model_parallel", initialize_model_parallel)

    patches.when_imported("megatron.core.optimizer", optimizer)
    patches.when_imported("megatron.core.parallel_state", pipeline)


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_param_groups(*args: Any, **kwargs: Any) -> Any:
        patches = Patches()
        patches.set(torch.distributed, "all_gather_object", _own_for_all)
        try:
            return original(*args, **kwargs)
        finally:
            patches.undo()

    return get_param_groups


def _own_for_all(gathered: list[Any], mine: Any, group: Any = None) -> None:
    gathered[:] = [list(mine) for _ in gathered]
