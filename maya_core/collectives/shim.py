"""Installs the emulated backends in torch.distributed, where NCCL and gloo would be."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from maya_core.collectives import own_buffers, scale, stores
from maya_core.collectives.exchange import Exchange, carrying_objects
from maya_core.collectives.store_keys import Keys
from maya_core.errors import MayaError
from maya_core.patches import Patches
from maya_core.torch_seam import distributed as seam

# Collectives of Python objects: torch pickles them into tensors on the group's device, and the host reads them on arrival.
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


def install(
    native: ModuleType,
    exchange: Exchange,
    keys: Keys,
    on_world: Callable[[int, int], None],
    patches: Patches,
) -> None:
    """Installs the emulated backends. `on_world` is called with this process's rank and world size once they are known."""
    native.set_collectives(exchange)
    patches.on_undo(functools.partial(native.set_collectives, None))
    patches.on_undo(_forget_groups)
    patches.on_undo(functools.partial(setattr, sys, "excepthook", sys.excepthook))  # init_process_group sets one
    _process_groups(native, patches)
    scale.install(patches)
    own_buffers.install(native, patches)
    _stores(keys, patches)
    for name in OBJECT_COLLECTIVES:
        _set_in_both(patches, name, _carrying_objects(native, getattr(c10d, name)))
    # ZeroRedundancyOptimizer pickles objects itself, to send its shards to the rank that saves them.
    seam.BROADCAST_OBJECT.wrap(patches, functools.partial(_carrying_objects, native))
    for each in seam.SYMMETRIC_MEMORY:
        each.replace(patches, functools.partial(_no_symmetric_memory, each.name))
    seam.NVSHMEM_AVAILABLE.replace(patches, lambda: False)
    _set_in_both(patches, "init_process_group", _noting_world(c10d.init_process_group, exchange, on_world))


def _set_in_both(patches: Patches, name: str, value: Any) -> None:
    patches.set(c10d, name, value)
    patches.set(dist, name, value)


def _process_groups(native: ModuleType, patches: Patches) -> None:
    nccl, gloo = native.ProcessGroupNCCL, native.ProcessGroupGloo
    for number, policy in enumerate(("DEFAULT", "EFFICIENCY", "ZERO")):
        setattr(nccl, f"NCCL_CTA_POLICY_{policy}", number)
    # A program can tune NCCL's kernels there; the emulation does not depend on it.
    nccl.Options.config = property(lambda self: self.__dict__.setdefault("config", SimpleNamespace()))
    for names, emulated in ((seam.PROCESS_GROUP_NCCL, nccl), (seam.PROCESS_GROUP_GLOO, gloo)):
        for name in names:
            name.replace(patches, emulated)
    seam.NCCL_AVAILABLE.replace(patches, True)
    seam.GLOO_AVAILABLE.replace(patches, True)
    seam.NCCL_TIMEOUT.replace(patches, timedelta(minutes=10))
    # DDP's logger reads fields of a gloo group that only torch's C++ class has. Nobody reads its log in an emulation.
    seam.DDP_LOG.replace(patches, lambda *_: None)
    # The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL compares collectives over gloo; Maya compares them when it collates traces.
    seam.GROUP_WRAPPER.replace(patches, lambda wrapped_pg, *args, **kwargs: wrapped_pg)


def _stores(keys: Keys, patches: Patches) -> None:
    stores.EmulatedStore.keys = keys
    for emulated in (stores.TCPStore, stores.FileStore):
        for name in seam.STORES[emulated.__name__]:
            name.replace(patches, emulated)
    seam.STORE_BASED_BARRIER.replace(
        patches, lambda *args, **kwargs: None
    )  # it would count ranks that are not emulated
    patches.on_undo(stores.EmulatedStore.alive.clear)


def _carrying_objects(native: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def emulated(*args: Any, **kwargs: Any) -> Any:
        with carrying_objects(native):
            return original(*args, **kwargs)

    return emulated


def _no_symmetric_memory(name: str, *args: Any, **kwargs: Any) -> None:
    raise MayaError(
        f"symmetric memory is not emulated ({name}): Maya would not see the transfers through it.",
        "Switch off what uses it: async tensor parallelism, or the collectives of torch.ops.symm_mem.",
    )


def _noting_world(
    original: Callable[..., Any], exchange: Exchange, on_world: Callable[[int, int], None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def emulated(*args: Any, **kwargs: Any) -> Any:
        exchange.worlds += 1
        result = original(*args, **kwargs)
        on_world(dist.get_rank(), dist.get_world_size())
        return result

    return emulated


def _forget_groups() -> None:
    """Destroys the process groups of the emulation, which cannot be used after it."""
    if dist.is_initialized():
        dist.destroy_process_group()
