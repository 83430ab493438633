"""Tensors on the emulated device that are sent to another process, through queues, pipes and arguments of torch.multiprocessing.

On a GPU the receiver maps the sender's memory (CUDA IPC). Here it gets memory that its allocator does not count, because the sender's does. Known
values travel along as far as they are small; what one process writes later, the other does not see.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import torch

from maya_core.patches import Patches
from maya_core.torch_seam import multiprocessing as seam

LARGEST_SENT = 2**20  # elements of a tensor whose known values travel along
_HANDLE = "_maya_ipc_handle"
_numbers = itertools.count()
_installed: list[ModuleType] = []  # the native device of this process


def install(native: ModuleType, patches: Patches) -> None:
    def share(storage: Any) -> tuple[Any, ...]:
        # Each storage has one handle, by which the receiver knows it again.
        if getattr(storage, _HANDLE, None) is None:
            setattr(storage, _HANDLE, f"{os.getpid()}-{next(_numbers)}".encode())
        return storage.get_device(), getattr(storage, _HANDLE), storage.nbytes(), 0, b"", 0, b"", False

    def shared(device: int, handle: bytes, nbytes: int, *_: Any) -> Any:
        with _uncounted(native):
            return torch.UntypedStorage(nbytes, device=torch.device("cuda", device))  # type: ignore[no-untyped-call]

    seam.SHARE_CUDA.replace(patches, share)
    seam.NEW_SHARED_CUDA.replace(patches, staticmethod(shared))
    seam.RELEASE_IPC_COUNTER.replace(patches, staticmethod(lambda *_, **__: None))
    for kind, reduce in seam.reducers(ForkingPickler).items():
        patches.put(seam.table(ForkingPickler), kind, _with_values(native, reduce))
    _installed[:] = [native]
    patches.on_undo(_installed.clear)


@contextmanager
def _uncounted(native: ModuleType) -> Iterator[None]:
    native.begin_aside()
    try:
        yield
    finally:
        native.end_aside()


def _with_values(native: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(tensor: Any) -> Any:
        rebuild, arguments = original(tensor)
        if rebuild is not seam.REBUILD_CUDA_TENSOR.get():
            return rebuild, arguments
        return rebuild_with_values, (rebuild, arguments, _known_bytes(native, tensor.detach()))

    return reduce


def _known_bytes(native: ModuleType, tensor: torch.Tensor) -> bytes | None:
    """The tensor's values as bytes, if they are known and few."""
    host = native.host_value(tensor) if 0 < tensor.numel() <= LARGEST_SENT else None
    return None if host is None else host.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def rebuild_with_values(rebuild: Callable[..., Any], arguments: tuple[Any, ...], known: bytes | None) -> Any:
    """Makes the tensor in the receiver. Called by pickle."""
    tensor = rebuild(*arguments)
    here = tensor.detach()
    for native in _installed:
        if known is None:
            native.forget(here)
        else:
            native.remember(here, torch.frombuffer(bytearray(known), dtype=here.dtype).reshape(here.shape))
    return tensor
