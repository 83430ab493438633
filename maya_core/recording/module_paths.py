"""Records which module an op belongs to, by the path of the module in its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch import nn

from maya_core.patches import Patches
from maya_core.torch_seam.distributed import local_tensor
from maya_core.torch_seam.training import ORIGINAL_MODULE, original_module
from maya_core.trace.schema import Category, Phase


def on_device(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors on this rank's GPUs. Of a distributed tensor, the local part."""
    local = [local_tensor(tensor) for tensor in tensors]
    return [tensor.detach() for tensor in local if isinstance(tensor, torch.Tensor) and tensor.is_cuda]


def on_host(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors on the host. Of a distributed tensor, the local part."""
    local = [local_tensor(tensor) for tensor in tensors]
    return [tensor for tensor in local if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"]


class ModulePaths:
    """Numbers modules in the order in which they first run. Number 0 means outside any module."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.names = [""]

    def install(self, patches: Patches) -> None:
        patches.set(nn.Module, "__call__", self.native.recorded_module_call(nn.Module.__call__, self._name_tree))
        patches.on_undo(self.native.forget_module_numbers)

    def watch(self, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
        """Calls these functions like torch's module hooks, but invisibly to torch.compile. Returns a function that removes them."""
        self.native.watch_modules(before, after)
        return lambda: self.native.watch_modules(None, None)

    def where(self) -> str:
        """The present place in the model, in words: 'forward of GPT.blocks.3'."""
        module, phase = self.native.current_place()
        return f"{Phase(phase).name.lower()} of {self.names[module]}" if module else ""

    def _name_tree(self, root: nn.Module) -> None:
        """Numbers a model. A module that runs and has no number yet is the root of one."""
        name = _class_name(original_module(root))  # torch.compile's wrapper gets the name of what it wraps
        for path, module in root.named_modules():
            self.native.number_module(module, len(self.names))
            path = path.removeprefix(ORIGINAL_MODULE).removeprefix(".")
            self.names.append(f"{name}.{path}" if path else name)
        # Called on nn.Module, because Megatron's DDP has an attribute of the same name.
        self.native.label(on_device(nn.Module.parameters(root)), Category.PARAMETERS)
        self.native.label(on_device(nn.Module.buffers(root)), Category.BUFFERS)


def _class_name(module: nn.Module) -> str:
    """The name of a module's class. A module of TorchScript was made from one that has a class of its own."""
    return str(module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__)
