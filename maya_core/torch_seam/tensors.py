"""Tensors, storages and trees of them. In torch 2.10 to 2.15."""

from __future__ import annotations

from typing import Any

from torch import ops as _ops
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.utils import _pytree as pytree

__all__ = [
    "address",
    "flatten",
    "fused_adamw_",
    "fused_sgd_",
    "pytree",
    "storage_at",
    "unflatten",
    "untyped",
    "wrapper_subclass",
]

fused_adamw_ = _ops.aten._fused_adamw_  # torch's fused optimizers update lists of tensors
fused_sgd_ = _ops.aten._fused_sgd_


def untyped(storage: Any) -> Any:
    """The untyped storage of a typed one; an untyped one itself."""
    return getattr(storage, "_untyped_storage", storage)


def address(storage: Any) -> int:
    """The address of a storage's C++ object, which identifies it while it lives."""
    return int(storage._cdata)


def storage_at(address: int, device: Any, nbytes: int) -> Any:
    """A storage over memory that something else keeps."""
    import torch

    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def wrapper_subclass(cls: type, sizes: Any, **options: Any) -> Any:
    """A tensor of a subclass that has no memory of its own."""
    import torch

    return torch.Tensor._make_wrapper_subclass(cls, sizes, **options)
