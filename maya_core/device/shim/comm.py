"""Copies between the GPUs of one process: the functions of torch._C that nn.DataParallel and torch.nn.parallel.comm call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam
from maya_core.torch_seam.names import replace_all


def _on(device: int) -> torch.device:
    return torch.device("cpu") if device < 0 else torch.device("cuda", device)


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [tensor if tensor.device == _on(device) else tensor.to(_on(device), non_blocking=True) for device in devices]


def broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    for target in out:
        target.copy_(tensor, non_blocking=True)
    return out


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    return [list(copies) for copies in zip(*(broadcast(tensor, devices) for tensor in tensors), strict=True)]


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[Any] | None = None,
) -> list[torch.Tensor]:
    chunks = torch.split_with_sizes(tensor, list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    placed = []
    for index, (chunk, device) in enumerate(zip(chunks, devices, strict=False)):
        stream = streams[index] if streams else None
        with torch.cuda.stream(stream):
            placed.append(chunk.to(_on(device), non_blocking=True).contiguous())
    return placed


def scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Sequence[Any] | None = None
) -> Sequence[torch.Tensor]:
    for chunk, target in zip(
        torch.split_with_sizes(tensor, [target.size(dim) for target in out], dim), out, strict=True
    ):
        target.copy_(chunk, non_blocking=True)
    return out


def gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    target = _on(torch.cuda.current_device() if destination is None else destination)
    return torch.cat([tensor.to(target, non_blocking=True) for tensor in tensors], dim)


def gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    start = 0
    for tensor in tensors:
        out.narrow(dim, start, tensor.size(dim)).copy_(tensor, non_blocking=True)
        start += tensor.size(dim)
    return out


def install(patches: Patches) -> None:
    # A CUDA build would reduce with its own NCCL. Without it, torch adds the tensors one after the other.
    patches.set(torch.cuda.nccl, "is_available", lambda tensors: False)
    replace_all(
        patches,
        {
            seam.BROADCAST: broadcast,
            seam.BROADCAST_OUT: broadcast_out,
            seam.BROADCAST_COALESCED: broadcast_coalesced,
            seam.SCATTER: scatter,
            seam.SCATTER_OUT: scatter_out,
            seam.GATHER: gather,
            seam.GATHER_OUT: gather_out,
        },
    )
