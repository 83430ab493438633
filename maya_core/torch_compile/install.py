"""Installs the emulation of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.device.emulated import EmulatedDevice
from maya_core.messages import say
from maya_core.torch_compile import (
    benchmarks,
    block_masks,
    caches,
    description,
    driver,
    dynamo,
    graph_trees,
    launchers,
    user_kernels,
)
from maya_core.torch_compile.compile_record import CompileRecord
from maya_core.torch_seam import compile as seam
from maya_core.torch_seam import cuda as cuda_seam
from maya_core.torch_seam.version import TRITON, installed

THREADS = 1  # compilation stays in this process, because inductor's workers do not have the emulated device


def settings() -> dict[str, dict[str, Any]]:
    """Settings of dynamo and inductor for the time of the emulation."""
    return {
        # Caches must not contain compiled kernels.
        "inductor": {
            "compile_threads": THREADS,
            seam.static_launcher_setting(): False,
            "bundle_triton_into_fx_graph_cache": False,
        },
        # Otherwise dynamo remembers which sizes changed in an earlier run, and this run starts with other kernels than that one.
        "dynamo": {"automatic_dynamic_local_pgo": False},
    }


class TorchCompile:
    """torch.compile on an emulated device, until the device's patches are undone."""

    def __init__(self, device: EmulatedDevice, module_call: Any, step: Callable[[], int]) -> None:
        patches = device.patches
        self.folder = caches.install(device.gpu, patches)
        device.pass_over(str(self.folder))  # lines of generated code are not the program's
        for config, values in settings().items():
            patches.when_imported(seam.CONFIGS[config], self._settings(device, values))
        patches.when_imported(seam.ENTRY, self._check_triton)
        seam.COMPILE_THREADS.replace(patches, lambda: THREADS)  # also if the program sets another number
        cuda_seam.EMPTY_STRIDED.replace(patches, empty_strided_cuda)
        self.record = CompileRecord(step, patches)
        driver.install(device.gpu, patches)
        dynamo.install(module_call, patches)
        description.install(patches)
        prices = benchmarks.Prices(device.native, device.planner)
        launchers.install(prices, patches)
        benchmarks.install(prices, patches)
        graph_trees.install(device.native, patches)
        user_kernels.install(device.rules, device.planner, patches)
        block_masks.install(device.rules, patches)
        seam.reset()
        patches.on_undo(seam.reset)

    @staticmethod
    def _settings(device: EmulatedDevice, values: dict[str, Any]) -> Any:
        def settle(config: Any) -> None:
            for name, value in values.items():
                seam.set_in_all_threads(device.patches, config, name, value)

        return settle

    @staticmethod
    def _check_triton(_: ModuleType) -> None:
        torch, found = installed(), caches.triton_version()
        wanted = TRITON[torch.version]
        if found is None:
            say(
                f"torch.compile needs Triton for its GPU kernels, and Triton is not installed. Run: pip install triton=={wanted}"
            )
        elif found.split("+")[0].rpartition(".")[0] != wanted.rpartition(".")[0]:
            say(
                f"Triton {found} is installed, and torch {torch.text} is released with {wanted}: it may generate other kernels, or fail. "
                f"Run: pip install triton=={wanted}"
            )


def empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """The function with which generated code allocates; only a CUDA build has it."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")
