"""pynvml and nvidia-smi as they answer on a node with the emulated GPUs."""

from __future__ import annotations

from types import ModuleType

from maya_core.device.patches import Patches
from maya_core.hardware.catalog import Gpu


def put_on(native: ModuleType, gpu: Gpu, gpus: int, patches: Patches) -> None:
    pass
