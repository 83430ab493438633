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
from maya_core.torch_seam import cuda as seam
from maya_core.torch_seam.names import replace_all


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

    replace_all(
        patches,
        {
            seam.ALLOCATOR_STATE: AllocatorState,
            seam.GET_CHECKPOINT_STATE: lambda device, pool: AllocatorState(),
            seam.SET_CHECKPOINT_POOL_STATE: lambda device, state, stale, live: None,
            seam.CHECK_POOL_LIVE_ALLOCATIONS: lambda device, pool, live: True,
            seam.CONSTRUCT_TENSOR: tensor_of,
            seam.DATA_POINTERS_EQUAL: pointers_equal,
            seam.FREE_AND_REMOVE_DELETER: native.free_and_forget_memory,
            seam.HAS_STANDARD_DELETER: lambda storage: True,
            seam.FORBID_TENSOR_ACCESS: native.forbid_tensor,
            seam.FORBID_STORAGE_ACCESS: native.forbid_storage,
        },
    )


def pointers_equal(tensors: Sequence[Any], pointers: Sequence[int | None], places: Sequence[int]) -> bool:
    return all(tensors[place].data_ptr() == pointers[place] for place in places)
