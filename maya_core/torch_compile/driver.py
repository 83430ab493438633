"""Triton's driver for the emulated GPU: the target for which kernels are generated, and the limits of an SM."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from maya_core.hardware.catalog import Gpu
from maya_core.patches import Patches
from maya_core.torch_seam.compile import DRIVER
from maya_core.torch_seam.cuda import GET_CURRENT_RAW_STREAM


class Properties:
    """The part of Triton's CudaUtils that is used when no kernel is loaded or launched."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.gpu.shared_memory_per_block_bytes,
            "max_num_regs": 65536,
            "multiprocessor_count": self.gpu.sms,
            "warpSize": 32,
            "sm_clock_rate": int(self.gpu.boost_clock_mhz * 1000),
            "mem_clock_rate": int(self.gpu.memory_clock_mhz * 1000),
            "mem_bus_width": self.gpu.memory_bus_bits,
        }


def install(gpu: Gpu, patches: Patches) -> None:
    def replace(module: ModuleType) -> None:
        nvidia = module.backends["nvidia"].driver

        class EmulatedDriver(nvidia):  # type: ignore[misc, valid-type]
            """Triton's own driver, without the CUDA driver library that it would load."""

            def __init__(self) -> None:
                self.utils = Properties(gpu)
                self.launcher_cls = None
                self.get_device_capability = lambda device=None: gpu.compute_capability
                self.get_current_stream = GET_CURRENT_RAW_STREAM.get()
                self.get_current_device = torch.cuda.current_device
                self.set_current_device = torch.cuda.set_device

        driver: Any = EmulatedDriver()
        patches.set(module.driver, "_active", driver)
        patches.set(module.driver, "_default", driver)

    patches.when_imported(DRIVER, replace)
