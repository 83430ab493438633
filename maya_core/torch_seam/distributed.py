"""torch.distributed: process groups, stores, FSDP, and the launchers of ranks. Names without versions are in torch 2.10 to 2.15."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from maya_core.torch_seam.names import Name

C10D, PACKAGE, NATIVE = "torch.distributed.distributed_c10d", "torch.distributed", "torch._C._distributed_c10d"

# ---- process groups ----
# A CPU build has no NCCL. c10d, its package and the native module each have the classes under their own name.
# Since 2.14 there are further implementations of NCCL's, one of which is the default since 2.15: they are emulated alike.
PROCESS_GROUP_NCCL = (
    *(Name(owner, "ProcessGroupNCCL", cuda_build=True) for owner in (C10D, PACKAGE, NATIVE)),
    *(Name(owner, "ProcessGroupNCCL2", since=(2, 14), cuda_build=True) for owner in (C10D, PACKAGE, NATIVE)),
    *(Name(owner, "ProcessGroupNCCLLazy", since=(2, 14), cuda_build=True) for owner in (C10D, PACKAGE, NATIVE)),
)
PROCESS_GROUP_GLOO = tuple(Name(owner, "ProcessGroupGloo") for owner in (C10D, PACKAGE, NATIVE))
NCCL_AVAILABLE = Name(C10D, "_NCCL_AVAILABLE")
GLOO_AVAILABLE = Name(C10D, "_GLOO_AVAILABLE")
NCCL_TIMEOUT = Name(C10D, "default_pg_nccl_timeout")
GROUP_WRAPPER = Name(C10D, "_create_process_group_wrapper")
STORE_BASED_BARRIER = Name(C10D, "_store_based_barrier")
DDP_LOG = Name("torch.distributed:Logger", "set_construction_data_and_log")
BROADCAST_OBJECT = Name("torch.distributed.optim.zero_redundancy_optimizer", "_broadcast_object")
# A program must call one of these before it can use memory that GPUs share.
SYMMETRIC_MEMORY = tuple(
    Name(f"{NATIVE}:_SymmetricMemory", name)
    for name in ("empty_strided_p2p", "get_mempool_allocator", "rendezvous", "set_backend")
)
NVSHMEM_AVAILABLE = Name(NATIVE, "_is_nvshmem_available", cuda_build=True)
STORES = {
    name: tuple(Name(owner, name) for owner in (PACKAGE, "torch.distributed.rendezvous"))
    for name in ("TCPStore", "FileStore")
}

# ---- functions that allocate the memory of data parallelism's collectives, and nothing else ----
BUFFER_MAKERS = (
    Name("torch.distributed:Reducer", "__init__"),
    Name("torch.distributed:Reducer", "_rebuild_buckets"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_all_gather"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_all_gather_copy_out"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param_group", "foreach_reduce"),
    Name("torch.distributed.fsdp._flat_param:FlatParamHandle", "_alloc_padded_unsharded_flat_param"),
    Name("torch.distributed.fsdp._flat_param:FlatParamHandle", "_use_low_precision_shard"),
    Name("torch.distributed.fsdp._runtime_utils", "_get_reduce_scatter_tensors"),
)
CHUNK_WITH_EMPTY = Name("torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty")

# ---- launchers ----
TORCHRUN = Name("torch.distributed.run", "run")
TORCHRUN_FILE = str(Path(torch.__path__[0], "distributed", "run.py"))
RECORD = Name("torch.distributed.elastic.multiprocessing.errors", "record")  # decorates `main` of that file
START_PROCESSES = tuple(
    Name(owner, "start_processes") for owner in ("torch.multiprocessing", "torch.multiprocessing.spawn")
)
NAMES = (
    *PROCESS_GROUP_NCCL,
    *PROCESS_GROUP_GLOO,
    *SYMMETRIC_MEMORY,
    *(name for names in STORES.values() for name in names),
    *BUFFER_MAKERS,
    *START_PROCESSES,
)  # of the tuples above, for the seam test


def group_ranks() -> list[dict[int, int]]:
    """The global ranks of each process group of this rank."""
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_group_ranks.values())


def default_store() -> Any:
    """The key-value store through which the ranks of the job found each other."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def is_own_code(module: Any) -> bool:
    """Whether a module's name is that of torch's own collectives, which the program calls."""
    return bool(module == C10D)


def flat_parameter(module: Any) -> Any | None:
    """The flat parameter of an FSDP1 module, which holds its parameters one after the other; None for other modules."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    return flat if hasattr(flat, "_shapes") else None


def flat_parts(flat: Any) -> tuple[list[Any], list[Any]]:
    """The parameters in a flat parameter (none, unless the program keeps the original ones), and all their shapes."""
    return list(flat._params or ()), list(flat._shapes)


def local_tensor(tensor: Any) -> Any:
    """This rank's part of a DTensor; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
