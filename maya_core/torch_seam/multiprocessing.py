"""torch.multiprocessing: how tensors are sent to another process. In torch 2.10 to 2.15."""

from __future__ import annotations

from typing import Any

from maya_core.torch_seam.names import Name

SHARE_CUDA = Name("torch:UntypedStorage", "_share_cuda_")
NEW_SHARED_CUDA = Name("torch:UntypedStorage", "_new_shared_cuda")
RELEASE_IPC_COUNTER = Name("torch:UntypedStorage", "_release_ipc_counter_cuda")
REBUILD_CUDA_TENSOR = Name("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
REDUCE_TENSOR = Name("torch.multiprocessing.reductions", "reduce_tensor")


def table(pickler: Any) -> dict[type, Any]:
    """What Python's pickler for processes calls, by the type of an object."""
    found: dict[type, Any] = pickler._extra_reducers
    return found


def reducers(pickler: Any) -> dict[type, Any]:
    """Those of tensors and parameters."""
    reduce = REDUCE_TENSOR.get()
    return {kind: found for kind, found in table(pickler).items() if found is reduce}
