"""The interface of the stand-ins to the emulated device: it records kernels, and holds what Transformer Engine keeps on each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from maya_core.errors import MayaError
from maya_core.integration import Category, Integration

NAMESPACE = "transformer_engine"
# get_cublas_workspace_size_bytes in pytorch/module/base.py
HOPPER_WORKSPACE = 32 * 2**20 + 1024
OTHER_WORKSPACE = 4_194_304
CUBLAS_STREAMS = 4  # for grouped products: nvte_get_num_compute_streams


class Device:
    """The present emulation. Layers need it here, because Megatron creates them without a reference to it."""

    def __init__(self, integration: Integration) -> None:
        self.rules = integration.rules
        self._integration = integration
        capability = integration.gpu.compute_capability
        self.workspace_bytes = HOPPER_WORKSPACE if capability[0] >= 9 else OTHER_WORKSPACE
        self.has_eight_bits = capability >= (8, 9)
        # is_non_tn_fp8_gemm_supported: whether FP8 products need both factors with the summed dimension last
        self.transposes = not ((10, 0) <= capability < (12, 0) or capability >= (13, 0))
        self.histories: list[Any] = []  # the histories of layers with delayed scaling
        self._workspaces: dict[str, list[torch.Tensor]] = {}
        self._dummies: dict[Any, torch.Tensor] = {}

    def workspace(self) -> None:
        """Allocated by the first product, and kept."""
        self._keep("one", 1)

    def workspaces_of_streams(self) -> None:
        """The same for grouped products, one for each stream. They are not shared with single products."""
        self._keep("grouped", CUBLAS_STREAMS)

    def _keep(self, which: str, count: int) -> None:
        if which not in self._workspaces:
            size = self.workspace_bytes
            self._workspaces[which] = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]

    def are_parameters(self, *tensors: Any) -> None:
        """Labels FP8 copies of weights, which are not parameters of any module, for the memory report."""
        self._integration.label([one for one in tensors if one is not None], Category.PARAMETERS)

    def dummy_gradient(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The dummy gradient of a parameter whose gradient was added to `main_grad`. There is one for each shape."""
        if (shape, dtype) not in self._dummies:
            self._dummies[shape, dtype] = torch.empty(shape, dtype=dtype, device="cuda")
        return self._dummies[shape, dtype].detach()


_device: list[Device] = []


def install(integration: Integration) -> None:
    _device.append(Device(integration))
    integration.patches.on_undo(_device.clear)


def device() -> Device:
    if not _device:
        raise MayaError(
            "a layer of Transformer Engine was made under integration, and called after it.",
            "Make the model anew; outside an emulation it needs Transformer Engine itself.",
        )
    return _device[-1]


def launch(name: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """Records one kernel that reads the inputs and writes the outputs."""
    record(f"{NAMESPACE}::{name}", inputs, outputs)


def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Records out = left @ right by cuBLASLt, whose epilogue handles biases and their gradients. `out` may have a wider dtype, or be
    accumulated into."""
    device().workspace()
    record("aten::mm", [left, right], [out])
    return out


def product8(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same with FP8 factors."""
    device().workspace()
    record("aten::_scaled_mm", [left, right], [out])
    return out


def record(op: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    # Work of a module during backward counts as recomputation if gradients are enabled. Inside an autograd.Function they are
    # not.
    with torch.enable_grad():
        device().rules.record(op, inputs, outputs)
