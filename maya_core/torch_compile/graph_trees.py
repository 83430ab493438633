"""What inductor's CUDA graph trees (mode="reduce-overhead") ask of a CUDA build of torch. The trees themselves run as they are: they warm up,
record and replay on the emulated device's graphs and private pools.

One thing is less than on a GPU: a pool's blocks are not put back to an earlier state. That happens where a graph is recorded after others
were replayed, as with a new shape: then the outputs of the earlier graphs that still live are not counted into the pool a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from maya_core.device.patches import Patches


class AllocatorState:
    """What a private pool looked like at some time: not kept."""


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
