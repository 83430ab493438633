"""The functions of a CUDA build of torch that inductor's CUDA graph trees (mode="reduce-overhead") call. The trees themselves run unchanged:
they warm up, record and replay with the graphs and private pools of the emulated device.

One thing is not emulated: a pool's blocks are not restored to an earlier state. On a GPU that happens when a graph is recorded after others
were replayed, for a new shape for example. Outputs of the earlier graphs that are still alive are then not counted in the pool a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from maya_core.patches import Patches


class AllocatorState:
    """The state of a private pool at some time. It is not recorded."""


def install(native: ModuleType, patches: Patches) -> None:
    def tensor_of(metadata: dict[str, Any], storage: Any) -> torch.Tensor:
        made: torch.Tensor = native.tensor_on_storage(
            storage,
            list(metadata["size"]),
            list(metadata["stride"]),
            metadata["storage_offset"],
            metadata["dtype"],
        )
        return made

    functions = {
        "_cuda_CUDAAllocator_AllocatorState": AllocatorState,
        "_cuda_getCheckpointState": lambda device, pool: AllocatorState(),
        "_cuda_setCheckpointPoolState": lambda device, state, stale, live: None,
        "_cuda_checkPoolLiveAllocations": lambda device, pool, live: True,
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": tensor_of,
        "_tensors_data_ptrs_at_indices_equal": pointers_equal,
        "_free_And_Remove_DeleterFn": native.free_and_forget_memory,
        "_has_Standard_Deleter": lambda storage: True,
        "_set_storage_access_error_msg": native.forbid_tensor,
        "_set_storage_data_ptr_access_error_msg": native.forbid_storage,
    }
    for name, function in functions.items():
        patches.set(torch._C, name, function)


def pointers_equal(tensors: Sequence[Any], pointers: Sequence[int | None], places: Sequence[int]) -> bool:
    return all(tensors[place].data_ptr() == pointers[place] for place in places)
