"""Labels the memory that torch's data parallelism allocates for its collectives: DDP's buckets, the weights that FSDP gathers, and
gradients that wait to be reduced. Without the label, what is allocated in a forward pass would count as activations. Checked with torch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.patches import Patches
from maya_core.trace.schema import Category

# Functions that allocate nothing else, by module. Memory that becomes a gradient (a view of a bucket, a reduced shard) is relabelled later.
MAKERS = {
    "torch.distributed": ("Reducer.__init__", "Reducer._rebuild_buckets"),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        "foreach_all_gather",
        "foreach_all_gather_copy_out",
        "foreach_reduce",
    ),
    "torch.distributed.fsdp._flat_param": (
        "FlatParamHandle._alloc_padded_unsharded_flat_param",
        "FlatParamHandle._use_low_precision_shard",
    ),
    "torch.distributed.fsdp._runtime_utils": ("_get_reduce_scatter_tensors",),
}


def install(native: ModuleType, patches: Patches) -> None:
    for module, names in MAKERS.items():
        patches.when_imported(module, functools.partial(_label, names, native, patches))


def _label(names: tuple[str, ...], native: ModuleType, patches: Patches, module: ModuleType) -> None:
    for name in names:
        owner, _, function = name.rpartition(".")
        target = getattr(module, owner) if owner else module
        patches.set(target, function, _making_buffers(native, getattr(target, function)))


def _making_buffers(native: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        before = native.allocate_as(Category.BUFFERS)
        try:
            return original(*args, **kwargs)
        finally:
            native.allocate_as(before)

    return labelled
