"""Starts the ranks that Megatron needs, and avoids others. The stages of this rank's pipeline will exchange messages with it, so they are
all started as soon as they are known, instead of one after the other when messages arrive. For checkpoints, Megatron gathers the names
of parameter groups from all ranks. Ranks that share a model have the same names, so each rank uses its own for all of them, and no
rank is emulated for that."""

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
