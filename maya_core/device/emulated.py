"""The emulated device of this process: it takes the place of CUDA, until it is removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

from maya_core.device import build, op_table
from maya_core.device.planner import KernelSeconds, Planner, no_durations
from maya_core.device.shim import cuda as shim
from maya_core.device.visible import VisibleGpus
from maya_core.errors import MayaError
from maya_core.hardware.catalog import Gpu
from maya_core.hardware.host_costs import CALL_S, DISPATCH_S
from maya_core.ops.attention_choice import prefers_cudnn
from maya_core.ops.registry import VALUES
from maya_core.ops.rules import Rules, no_rule_message
from maya_core.patches import Patches
from maya_core.torch_seam import native_kernels
from maya_core.torch_seam.cuda import libraries
from maya_core.trace.call import DEFAULT_SETTINGS
from maya_core.trace.schema import Phase
from maya_core.version import PACKAGE


class EmulatedDevice:
    """`gpus` emulated GPUs of one kind in this process, until `remove`. `private` is a folder that is removed even if this process is
    killed. `kernel_seconds` prices kernels for programs that time their GPU. `node_gpus` are those of the node, of which CUDA_VISIBLE_DEVICES may
    show fewer; None if nobody has said how many there are."""

    current: ClassVar[EmulatedDevice | None] = None  # the one that is on in this process

    def __init__(
        self,
        gpu: Gpu,
        gpus: int,
        private: Path | None = None,
        kernel_seconds: KernelSeconds = no_durations,
        node_gpus: int | None = None,
    ) -> None:
        self.native = build.native()
        if self.native.installed():
            raise MayaError(
                "an emulation is running already in this process.",
                "Leave the first `emulate(...)` block before entering another.",
            )
        self.gpu = gpu
        self.planner = Planner(gpu, kernel_seconds, self.native.setting_names())
        self.where: Callable[[], str] = lambda: ""  # the place in the user's model, where somebody knows it
        self.patches = Patches()
        self.asked_gpu: dict[str, None] = {}  # lines of the program that asked which GPU it runs on, in order
        config = {
            "count": gpus,
            "major": gpu.compute_capability[0],
            "minor": gpu.compute_capability[1],
            "total_bytes": gpu.memory_bytes,
            "outside_bytes": gpu.outside_bytes,
            "prefer_cudnn_attention": prefers_cudnn(gpu),
            "deprioritize_cudnn_attention": os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1",
            "allocator_conf": shim.allocator_conf(),
            "cudnn_version": libraries().cudnn,
            "cuda_version": libraries().cuda_number,
        }
        self.rules = Rules(self.native, op_table.compressed_ops())
        sparse, nested = self.rules.composed(op_table.sparse_ops(), op_table.nested_ops())
        self._tell_native()
        try:
            self.native.install(
                config, op_table.cuda_ops(), sparse, nested, self.planner.plan, self.rules.table, self._no_rule
            )
        except BaseException as error:
            self.rules.close()
            if isinstance(error, ValueError):  # the allocator's configuration is the only thing a user writes here
                raise MayaError(
                    f"PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF: {error}", "Correct or unset it."
                ) from error
            raise
        self._libraries: list[str] = []
        self._torchs_kernels = False
        self.pass_over(*torch.__path__, str(PACKAGE))
        try:
            visible = VisibleGpus(self.native, node_gpus)
            shim.install(self.native, gpu, self.patches, private, self.asked_gpu, visible.count)
            self._torchs_kernels = native_kernels.imported()
            if self._torchs_kernels:  # otherwise torch registers them later, as it does on a GPU
                native_kernels.register()
        except BaseException:
            self.remove()
            raise
        EmulatedDevice.current = self

    def _tell_native(self) -> None:
        """What the native device has to know of ops, switches and costs, which are written down in Python."""
        names = self.planner.settings
        self.native.set_default_settings(sum(getattr(DEFAULT_SETTINGS, name) << bit for bit, name in enumerate(names)))
        self.native.set_op_values(
            {
                op: (
                    int(said.assume),
                    int(said.sample),
                    said.only_writes,
                    said.keeps_uniform,
                    said.heavy,
                    said.mixes_devices,
                )
                for op, said in VALUES.items()
            }
        )
        self.price_collectives(None)

    def price_collectives(self, nanoseconds: Callable[[int], float] | None) -> None:
        """How long the collective of that number takes, for programs that time their GPU; None: nobody knows yet, and none takes any."""
        dispatch = [DISPATCH_S[phase.name] * 1e9 for phase in Phase]
        calls = [CALL_S[name] * 1e9 for name in ("COLLECTIVE", "GRAPH_LAUNCH", "DEVICE_SYNC")]
        self.native.set_pricing(self.planner.cost, nanoseconds, dispatch, *calls)

    def pass_over(self, *folders: str) -> None:
        """Lines of code in these folders are not the program's: what they allocate is told by the line that called them."""
        self._libraries += [f"{folder}/" for folder in folders]
        self.native.library_folders(self._libraries)

    def is_library(self, file: str) -> bool:
        """Whether a file is not the program's."""
        return file.startswith(tuple(self._libraries))

    @property
    def gpus(self) -> int:
        return int(self.native.device_count())

    def grow(self, gpus: int) -> None:
        """There are so many GPUs from now on; never fewer than before."""
        self.native.grow(gpus)
        shim.see_more_gpus(self.native)

    def _no_rule(self, op: str, reason: str) -> str:
        return no_rule_message(op, reason, self.where())

    def remove(self) -> None:
        EmulatedDevice.current = None
        if self._torchs_kernels:
            native_kernels.remove()
        self.patches.undo()
        self.rules.close()
        self.native.uninstall()
        if self._torchs_kernels:
            native_kernels.register()
        self.native.set_pricing(None, None, [], 0.0, 0.0, 0.0)
