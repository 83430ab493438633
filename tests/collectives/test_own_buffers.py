"""The memory of DDP and FSDP for their collectives (buckets, gathered weights, gradients to reduce) is neither activations nor temporaries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import maya_core
from maya_core.report.prediction import DeviceMemory

WIDTH, LAYERS, GPUS = 1024, 8, 4
LAYER = 4 * WIDTH * WIDTH  # bytes of its weight
MODEL = LAYERS * LAYER


def peak(wrap: Callable[[nn.Module], nn.Module]) -> DeviceMemory:
    """The memory peak of a training with hardly any activations."""
    with maya_core.emulate("h100", gpus_per_node=GPUS, nodes=1) as job:
        dist.init_process_group("nccl")
        model = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = job.prediction.memory.ranks[0]
    assert rank.by_category_bytes["activations"] < LAYER // 8
    return rank


@pytest.mark.parametrize("view", [False, True])
def test_ddp(view: bool) -> None:
    held = peak(lambda model: DistributedDataParallel(model, gradient_as_bucket_view=view)).by_category_bytes
    assert held["parameters"] == held["gradients"] == MODEL
    assert held.get("buffers", 0) == (0 if view else MODEL)  # gradients that are views of the buckets exist only once


def sharded(model: nn.Module) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def flat(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)


@pytest.mark.parametrize("wrap", [sharded, flat])
def test_fsdp(wrap: Callable[[nn.Module], nn.Module]) -> None:
    held = peak(wrap).by_category_bytes
    assert held["parameters"] == MODEL / GPUS
    # The weights of two layers are gathered at a time, one of which is still transferred or copied, and the gradients of a layer are reduced.
    assert 2 * LAYER <= held["buffers"] <= 5 * LAYER
    # Gradients of two whole layers, as backward leaves them, and of activations.
    assert held.get("temporaries", 0) < 2.1 * LAYER
