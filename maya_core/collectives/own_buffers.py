"""Labels the memory that torch's data parallelism allocates for its collectives: DDP's buckets, the weights that FSDP gathers, and
gradients that wait to be reduced. Without the label, what is allocated in a forward pass would count as activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.patches import Patches
from maya_core.torch_seam.distributed import BUFFER_MAKERS
from maya_core.trace.schema import Category


def install(native: ModuleType, patches: Patches) -> None:
    """Memory that becomes a gradient (a view of a bucket, a reduced shard) is relabelled later."""
    for maker in BUFFER_MAKERS:
        maker.wrap(patches, functools.partial(_making_buffers, native))


def _making_buffers(native: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        before = native.allocate_as(Category.BUFFERS)
        try:
            return original(*args, **kwargs)
        finally:
            native.allocate_as(before)

    return labelled
