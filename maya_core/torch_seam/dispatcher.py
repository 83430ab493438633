"""The dispatcher: keys, guards, schemas and the libraries in which ops are implemented. In torch 2.10 to 2.15."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def keys(*names: str) -> Any:
    """A set of dispatch keys: keys("AutocastCPU", "AutocastCUDA")."""
    import torch

    together = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        together = together | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return together


def excluding(*names: str) -> AbstractContextManager[object]:
    """Without these dispatch keys."""
    import torch

    return torch._C._ExcludeDispatchKeyGuard(keys(*names))


def below_autograd() -> AbstractContextManager[object]:
    """As inside a kernel: nothing is differentiated."""
    import torch

    return torch._C._AutoDispatchBelowAutograd()


def schema(op: Any) -> Any:
    """The schema of an op's overload."""
    return op._schema


def overload(name: str) -> Any:
    """The overload `add.Tensor` of an ATen op; `add` stands for its default overload."""
    import torch

    base, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), which or "default")


def remove(library: Any) -> None:
    """Removes a library's kernels now. The garbage collector would do it later, while torch holds its own lock."""
    library._destroy()


def convolution_shape(*arguments: Any) -> list[int]:
    from torch._meta_registrations import calc_conv_nd_return_shape

    return list(calc_conv_nd_return_shape(*arguments))


def memory_format(tensor: Any) -> Any:
    """The memory format that torch would choose for a result like this tensor."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)
