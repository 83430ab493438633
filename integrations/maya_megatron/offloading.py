"""Offloads all of Megatron's activations (--fine-grained-activation-offloading) to the same host memory. Their values have no meaning,
and this machine may have less memory than the hosts of the GPUs. Copies are recorded as usual."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    patches = integration.patches
    shared: list[torch.Tensor] = []

    def room(size: int) -> torch.Tensor:
        if not shared or shared[0].numel() < size:
            shared[:] = [torch.empty(size, dtype=torch.uint8, pin_memory=True)]
        return shared[0][:size]

    def offload(self: Any, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True) -> Any:
        source = src_tensor.contiguous()
        on_host = room(source.nbytes).view(source.dtype).view(source.shape)
        on_host.copy_(source, non_blocking=pin_memory)
        return source.device, on_host, False  # not from the pool

    def offloading(module: ModuleType) -> None:
        patches.set(module.ChunkOffloadHandler, "offload", offload)

    patches.when_imported("megatron.core.pipeline_parallel.fine_grained_activation_offload", offloading)
