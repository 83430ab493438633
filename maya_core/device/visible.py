"""Which GPUs of a node the program sees: CUDA_VISIBLE_DEVICES, as CUDA reads it.

CUDA reads the variable when it is initialized, and torch.cuda.device_count() whenever it is called before. All GPUs of a node are alike, so only
their number matters.
"""

from __future__ import annotations

import os
from types import ModuleType

from maya_core.torch_seam import cuda as seam

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(value: str | None, node_gpus: int | None) -> int | None:
    """How many GPUs the variable shows of a node's, whose number may not be known; None if it shows none, or says nothing."""
    found: set[str] = set()
    for word in (value or "").split(","):
        name = word.strip()
        known = name.isdigit() and (node_gpus is None or int(name) < node_gpus)
        if not (known or name.startswith(("GPU-", "MIG-"))) or name in found:
            break  # CUDA ignores what follows
        found.add(name)
    return len(found) or None


class VisibleGpus:
    """Counts the GPUs that this process sees."""

    def __init__(self, native: ModuleType, node_gpus: int | None) -> None:
        self._native = native
        self._node_gpus = node_gpus  # None: nobody has said, so there are as many as the program names
        self._shown: int | None = None

    def count(self) -> int:
        if not seam.is_initialized():
            self._shown = visible_gpus(os.environ.get(VARIABLE), self._node_gpus)
            if self._shown is not None and self._node_gpus is None and self._shown > self._native.device_count():
                self._native.grow(self._shown)
        count = int(self._native.device_count())
        return count if self._shown is None else min(count, self._shown)
