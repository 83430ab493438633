"""The emulated device of this process: put in place of CUDA, and taken away again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

import maya_core
from maya_core.device import build, ops
from maya_core.device.face import cuda as face
from maya_core.device.kernels import Planner
from maya_core.device.patches import Patches
from maya_core.device.rules import Rules, no_rule_message
from maya_core.errors import MayaError
from maya_core.hardware.catalog import Gpu

MIB = 2**20


def blas_workspace_bytes(gpu: Gpu) -> int:
    """The workspace ATen gives each cuBLAS handle and stream (ATen/cuda/CUDABlas workspaces)."""
    if conf := os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        try:  # ":SIZE_KIB:COUNT" pairs
            numbers = [int(part) for part in conf.split(":") if part]
            return sum(size * 1024 * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))
        except ValueError:
            pass  # ATen warns and takes the default
    return 32 * MIB if gpu.compute_capability[0] >= 9 else 2 * 4096 * 1024 + 8 * 16 * 1024


def prefers_cudnn_attention(gpu: Gpu) -> bool:
    return gpu.compute_capability[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"


class EmulatedDevice:
    """`gpus` emulated GPUs of one kind in this process, until `remove`. `private` is a folder that somebody removes if it is killed."""

    current: ClassVar[EmulatedDevice | None] = None  # the one that is on in this process

    def __init__(self, gpu: Gpu, gpus: int, private: Path | None = None) -> None:
        self.native = build.native()
        if self.native.installed():
            raise MayaError(
                "an emulation is running already in this process.",
                "Leave the first `emulate(...)` block before entering another.",
            )
        self.gpu = gpu
        self.planner = Planner(gpu)
        self.where: Callable[[], str] = lambda: ""  # the place in the user's model, where somebody knows it
        self.patches = Patches()
        config = {
            "count": gpus,
            "major": gpu.compute_capability[0],
            "minor": gpu.compute_capability[1],
            "total_bytes": gpu.memory_bytes,
            "outside_bytes": gpu.outside_bytes,
            "blas_workspace_bytes": blas_workspace_bytes(gpu),
            "prefer_cudnn_attention": prefers_cudnn_attention(gpu),
            "allocator_conf": face.allocator_conf(),
            "cudnn_version": face.CUDNN_VERSION,
            "cuda_version": 13000,
        }
        self.rules = Rules(self.native)
        composed = self.rules.without_rule(ops.sparse_ops())
        try:
            self.native.install(config, ops.cuda_ops(), composed, self.planner.plan, self.rules.table, self._no_rule)
        except BaseException as error:
            self.rules.close()
            if isinstance(error, ValueError):  # the allocator's configuration is the only thing a user writes here
                raise MayaError(
                    f"PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF: {error}", "Correct or unset it."
                ) from error
            raise
        self._libraries: list[str] = []
        self.pass_over(*torch.__path__, *maya_core.__path__)
        try:
            face.put_on(self.native, gpu, self.patches, private)
        except BaseException:
            self.remove()
            raise
        EmulatedDevice.current = self

    def pass_over(self, *folders: str) -> None:
        """Lines of code in these folders are not the program's: what they allocate is told by the line that called them."""
        self._libraries += [f"{folder}/" for folder in folders]
        self.native.library_folders(self._libraries)

    @property
    def gpus(self) -> int:
        return int(self.native.device_count())

    def grow(self, gpus: int) -> None:
        """There are so many GPUs from now on; never fewer than before."""
        self.native.grow(gpus)
        face.see_more_gpus(self.native)

    def _no_rule(self, op: str, reason: str) -> str:
        return no_rule_message(op, reason, self.where())

    def remove(self) -> None:
        EmulatedDevice.current = None
        self.patches.undo()
        self.rules.close()
        self.native.uninstall()
