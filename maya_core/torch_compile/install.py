"""Installs the emulation of torch.compile."""

from __future__ import annotations

import functools
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

TRITON = "3.7.1"  # the version with which the CUDA build of torch 2.13 is released
# Compilation stays in one process, because workers would not have the emulated device; caches must not contain compiled kernels.
SETTINGS: dict[str, dict[str, Any]] = {
    "torch._inductor.config": {
        "compile_threads": 1,
        "use_static_triton_launcher": False,
        "bundle_triton_into_fx_graph_cache": False,
    },
    # Otherwise dynamo remembers which sizes changed in an earlier run, and this run starts with other kernels than that one.
    "torch._dynamo.config": {"automatic_dynamic_local_pgo": False},
}


class TorchCompile:
    """torch.compile on an emulated device, until the device's patches are undone."""

    def __init__(self, device: EmulatedDevice, module_call: Any, step: Callable[[], int]) -> None:
        patches = device.patches
        self.folder = caches.install(device.gpu, patches)
        device.pass_over(str(self.folder))  # lines of generated code are not the program's
        for name, values in SETTINGS.items():
            patches.when_imported(name, self._settings(device, values))
        patches.when_imported("torch._inductor.compile_fx", self._check_triton)
        patches.set(torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided_cuda)
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
        caches.forget_device()
        patches.on_undo(caches.forget_device)

    @staticmethod
    def _settings(device: EmulatedDevice, values: dict[str, Any]) -> Any:
        def settle(config: Any) -> None:
            for name, value in values.items():
                before = getattr(config, name)
                setattr(config, name, value)
                device.patches.on_undo(functools.partial(setattr, config, name, before))

        return settle

    @staticmethod
    def _check_triton(_: ModuleType) -> None:
        if caches.triton_version() is None:
            say(
                f"torch.compile needs Triton for its GPU kernels, and Triton is not installed. Run: pip install 'maya-emulator[compile]', or triton=={TRITON}"
            )


def empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """The function with which generated code allocates; only a CUDA build has it."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")
