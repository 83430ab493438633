"""Keeps large host tensors empty under offload. Master weights and optimizer states of a 7B model need 84 GB, and their values are not
known anyway. DeepSpeed allocates these tensors, but they are never written, and untouched pages need no memory. Copies between host
and GPU are recorded as usual; what the host would do with such tensors is recorded as host work, like its optimizers (ops.py).

Only calls from DeepSpeed's own code are changed, so the program's data is not affected. The patches are installed when a
configuration offloads to the host, and only in processes that are emulated from start to end.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration

LARGE = 2**26  # bytes of a storage; memory of this size comes directly from the system and is zero
CREATING = ("zeros", "zeros_like", "full", "full_like")
IN_PLACE = ("zero_", "fill_", "mul_", "div_", "add_")
MOVED = ("to", "clone", "float", "cpu", "contiguous")

Call = Callable[..., Any]


def install(integration: Integration) -> None:
    if integration.launcher is None:  # the process belongs to the user and continues afterwards
        return
    patches = integration.patches

    def config(module: ModuleType) -> None:
        original = module.DeepSpeedConfig.__init__
        on = False

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal on
            original(self, *args, **kwargs)
            offloads = (self.zero_config.offload_optimizer, self.zero_config.offload_param)
            if not on and any(one is not None and one.device == "cpu" for one in offloads):
                on = True
                _keep_empty(integration)

        patches.set(module.DeepSpeedConfig, "__init__", __init__)

    patches.when_imported("deepspeed.runtime.config", config)


def _keep_empty(integration: Integration) -> None:
    patches = integration.patches
    instead: dict[tuple[Any, str], Call] = {
        **{(torch, name): _created for name in CREATING},
        **{(torch.Tensor, name): functools.partial(_changed, integration) for name in IN_PLACE},
        **{(torch.Tensor, name): functools.partial(_moved, integration) for name in MOVED},
        (torch.Tensor, "copy_"): functools.partial(_copied, integration),
        (torch.Tensor, "pin_memory"): _pinned,
    }
    for (owner, name), emulated in instead.items():
        patches.set(owner, name, _for_deepspeed(getattr(owner, name), emulated))

    def constructors(module: ModuleType) -> None:
        """zero.Init saved torch's functions when it was imported, and restores them when it ends."""
        for name in CREATING:
            if hasattr(module, f"_orig_torch_{name}"):
                patches.set(module, f"_orig_torch_{name}", getattr(torch, name))

    patches.when_imported("deepspeed.runtime.zero.partition_parameters", constructors)


def _for_deepspeed(original: Call, emulated: Call) -> Call:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("deepspeed."):
            return original(*args, **kwargs)
        return emulated(original, *args, **kwargs)

    return call


def is_empty(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() >= LARGE


def _created(original: Call, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Allocates a tensor without filling it. Its size is found with the same call on the meta device."""
    device = kwargs.get("device")
    if device is None and args and isinstance(args[0], torch.Tensor):
        device = args[0].device
    if device is not None and torch.device(device).type != "cpu":
        return original(*args, **kwargs)
    plain = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    shape = original(*args, **{**plain, "device": "meta"})
    return torch.empty_like(shape, device="cpu") if shape.nbytes >= LARGE else original(*args, **kwargs)


def _changed(integration: Integration, original: Call, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not is_empty(tensor):
        return original(tensor, *args, **kwargs)
    reads = sum(one.nbytes for one in args if isinstance(one, torch.Tensor))
    integration.record_host_work(2 * tensor.nbytes + reads)
    return tensor


def _copied(
    integration: Integration, original: Call, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> Any:
    if not is_empty(to) and not is_empty(source):
        return original(to, source, non_blocking)
    _record_copy(integration, to, source, non_blocking)
    return to


def _moved(integration: Integration, original: Call, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns a copy of a tensor: on another device, of another dtype, or a plain copy."""
    on_host = tensor.device.type == "cpu"
    named = [one for one in (*args, kwargs.get("device")) if _is_device(one)]
    place = "cpu" if original.__name__ == "cpu" else named[0] if named else tensor.device
    target = torch.device(place)
    if tensor.is_meta or tensor.requires_grad or (not on_host and target.type != "cpu"):
        return original(tensor, *args, **kwargs)
    shape = torch.empty_like(tensor, device="meta")
    if original.__name__ != "cpu":  # the shape that the same call has on the meta device
        stays = {name: value for name, value in kwargs.items() if name != "device"}
        shape = original(shape, *(one for one in args if not _is_device(one)), **stays)
    if shape.nbytes < LARGE and not (on_host and is_empty(tensor)):
        return original(tensor, *args, **kwargs)
    same = shape.dtype == tensor.dtype and shape.stride() == tensor.stride()
    if on_host and target.type == "cpu" and same and original.__name__ != "clone":
        return tensor
    made = torch.empty_like(shape, device=target)
    _record_copy(integration, made, tensor, bool(kwargs.get("non_blocking", False)))
    return made


def _is_device(word: Any) -> bool:
    return isinstance(word, str | torch.device) or type(word) is int


def _record_copy(integration: Integration, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Records a copy like the device's own: the dtype is converted on the side of the source, then the bytes are copied."""
    if not to.is_cuda and not source.is_cuda:
        integration.record_host_work(to.nbytes + source.nbytes)
        return
    if to.dtype != source.dtype or not source.is_contiguous():
        if source.is_cuda:
            source = source.to(to.dtype).contiguous()
        else:
            integration.record_host_work(to.nbytes + source.nbytes)
            source = torch.empty_like(to, device="cpu")
    integration.record_call("aten::copy_", [to, source], [])
    if not non_blocking:
        integration.synchronize_current_stream((to if to.is_cuda else source).get_device())


def _pinned(original: Call, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(tensor, pin_memory=True) if is_empty(tensor) else original(tensor, *args)
