"""`torch.testing.assert_close` of values that nobody knows. It passes, as every check of such values does: a training is assumed to go well.
Shapes, dtypes and devices are compared all the same. torch.jit.trace compares what it traced with the original so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.patches import Patches
from maya_core.torch_seam.tensors import pytree


def install(patches: Patches, native: ModuleType) -> None:
    patches.wrap(torch.testing, "assert_close", functools.partial(_passing_unknown, native))


def _passing_unknown(native: ModuleType, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        try:
            original(actual, expected, **options)
        except AssertionError:
            without = _without_unknown(native, actual, expected)
            if without is None:
                raise
            original(*without, **options)

    return assert_close


def _without_unknown(native: ModuleType, actual: Any, expected: Any) -> tuple[Any, Any] | None:
    """Both sides, with tensors that have no values where one side's values are unknown. None if all are known."""
    ours, form = pytree.tree_flatten(actual)
    theirs, other_form = pytree.tree_flatten(expected)
    if form != other_form:
        return None
    unknown = [
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (_unknown(native, one) or _unknown(native, other))
        for one, other in zip(ours, theirs, strict=True)
    ]
    if not any(unknown):
        return None
    emptied = [
        [_as_meta(each) if drop else each for each, drop in zip(side, unknown, strict=True)] for side in (ours, theirs)
    ]
    return pytree.tree_unflatten(emptied[0], form), pytree.tree_unflatten(emptied[1], form)


def _unknown(native: ModuleType, tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor rest on some that nobody knows."""
    if tensor.is_cuda and tensor.layout is torch.strided:
        reading = native.read_value(tensor)
        return reading is None or bool(reading[1])
    return tensor.device.type == "cpu" and bool(native.is_made_up(tensor.untyped_storage()))


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its values. torch.testing compares no values of such tensors."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
