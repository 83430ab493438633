"""What a CUDA build of torch provides beyond torch.cuda: resizable storages, legacy tensor types, cuDNN and NVTX."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam

TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _LegacyTensor(type):
    """The metaclass of torch.cuda.FloatTensor and the like: a call makes a tensor, isinstance checks device and dtype."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        if not args:
            return torch.empty(0, dtype=cls.dtype, device="cuda")
        if all(isinstance(arg, int) for arg in args):
            return torch.empty(args, dtype=cls.dtype, device="cuda")
        if isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device="cuda")
        return torch.as_tensor(args[0], dtype=cls.dtype, device="cuda")


def legacy_types() -> dict[str, type]:
    return {
        name: _LegacyTensor(name, (), {"dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"})
        for name, dtype in TYPES.items()
    }


def install(native: ModuleType, patches: Patches) -> None:
    for name, cls in legacy_types().items():
        patches.add(torch.cuda, name, cls)  # a CUDA build adds them when it initializes a device
    _storages(native, patches)
    _cudnn(patches)
    seam.NVTX.replace(patches, _nvtx())


def _nvtx() -> SimpleNamespace:
    """NVTX without a profiler: ranges are counted, because a push returns its depth, and otherwise ignored."""
    depth = 0

    def push(_: str) -> int:
        nonlocal depth
        depth += 1
        return depth - 1

    def pop() -> int:
        nonlocal depth
        depth -= 1
        return depth

    return SimpleNamespace(
        rangePushA=push,
        rangePop=pop,
        rangeStartA=lambda message: 0,
        rangeEnd=lambda range_id: None,
        markA=lambda message: None,
        deviceRangeStart=lambda message, stream: 0,
        deviceRangeEnd=lambda handle, stream: None,
    )


def _storages(native: ModuleType, patches: Patches) -> None:
    storage = torch.UntypedStorage
    resize: Callable[..., torch.UntypedStorage] = storage.resize_
    new: Callable[..., torch.UntypedStorage] = storage.__new__

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        native.storage_resize(self, size)
        return self

    def make(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is None or torch.device(device).type != "cuda":
            return new(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        if args and not isinstance(args[0], int):
            return torch.tensor(list(args[0]), dtype=torch.uint8, device=device).untyped_storage()
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    patches.set(storage, "resize_", resize_)
    patches.set(storage, "__new__", staticmethod(make))


def _cudnn(patches: Patches) -> None:
    patches.set(torch.backends.cudnn, "version", lambda: seam.libraries().cudnn)
    patches.set(torch.backends.cudnn, "is_available", lambda: True)
    modes = SimpleNamespace(rnn_relu=0, rnn_tanh=1, lstm=2, gru=3)  # cudnnRNNMode_t
    patches.put(seam.cudnn_rnn_namespace(), "_cudnn", SimpleNamespace(RNNMode=modes))
    patches.set(
        torch.backends.cudnn,
        "is_acceptable",
        lambda tensor: (
            seam.cudnn_enabled()
            and tensor.is_cuda
            and tensor.dtype in (torch.half, torch.float, torch.double, torch.bfloat16)
        ),
    )
