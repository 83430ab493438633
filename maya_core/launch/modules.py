"""Module paths: which nn.Module's forward an op belongs to, under the name its root model knows it by."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import torch
from torch import nn

from maya_core.device.patches import Patches
from maya_core.trace.schema import Category, Phase


def on_device(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors of this rank's GPUs: of a distributed one, the part it holds."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return [tensor.detach() for tensor in local if isinstance(tensor, torch.Tensor) and tensor.is_cuda]


class ModulePaths:
    """Numbers modules as they first run. Number 0 is outside any module."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.names = [""]

    def put_on(self, patches: Patches) -> None:
        patches.set(nn.Module, "__call__", self.native.recorded_module_call(nn.Module.__call__, self._name_tree))
        patches.on_undo(self.native.forget_module_numbers)

    def where(self) -> str:
        """Where in the model the program is now, in words: 'forward of GPT.blocks.3'."""
        module, phase = self.native.current_place()
        return f"{Phase(phase).name.lower()} of {self.names[module]}" if module else ""

    def _name_tree(self, root: nn.Module) -> None:
        """A module that runs and has no number is the root of a model: it and all below it get theirs."""
        for path, module in root.named_modules():
            self.native.number_module(module, len(self.names))
            self.names.append(f"{type(root).__name__}.{path}" if path else type(root).__name__)
        self.native.label(on_device(root.parameters()), Category.PARAMETERS)
        self.native.label(on_device(root.buffers()), Category.BUFFERS)
