"""Computes the bytes that a kernel moves and its memory pattern from the tensors that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from maya_core.hardware.dtypes import FLOATS
from maya_core.ops.kernel import Streaming
from maya_core.trace.call import Tensor

SECTOR = 32  # bytes: DRAM is read and written in whole sectors


def moved(tensor: Tensor) -> int:
    """The bytes moved to read or write a whole tensor: expanded elements count once, and scattered ones a whole sector each."""
    if tensor.device == "cpu":
        return 0
    item = tensor.itemsize
    count, step = 1, 0
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        if size == 0:
            return 0
        if stride and size != 1:
            count *= size
            if not step or stride < step:
                step = stride
    if step > 1:
        return count * min(step * item, max(item, SECTOR))
    return count * item


def streaming(
    pattern: str,
    reads: Iterable[Tensor | None] = (),
    writes: Iterable[Tensor | None] = (),
    *,
    row: int = 0,
    elements: int | None = None,
) -> Streaming:
    """A kernel that reads and writes these tensors. If `elements` is not given, it is that of the largest tensor written."""
    read = sum([moved(tensor) for tensor in reads if tensor is not None])
    count = elements or 0
    written = 0
    for tensor in writes:
        if tensor is not None:
            written += moved(tensor)
            if elements is None:
                count = max(count, tensor.numel)
    return Streaming(pattern, read, written, count, row)


def relaid(source: Tensor, to: Tensor) -> Streaming:
    """A copy into another layout."""
    return streaming(layout([source], to), [source], [to])


def elementwise_pattern(inputs: list[Tensor], result: Tensor) -> str:
    """The pattern of an elementwise kernel."""
    found = layout(inputs, result)
    if found == "elementwise":
        # Operands of different floating-point dtypes are each read with a cast, without vector loads (Loops.cuh, LoadWithCast).
        floats = {tensor.dtype for tensor in inputs if tensor.dtype in FLOATS and tensor.sizes}
        if len(floats) > 1 or (floats and result.dtype in FLOATS and result.dtype not in floats):
            return "cast"
    return found


def layout(inputs: Iterable[Tensor], result: Tensor) -> str:
    """How an elementwise kernel accesses its operands (Loops.cuh, TensorIterator.cpp).

    Operands with the same layout are read with vector loads: "elementwise". Operands that are broadcast or have gaps need an offset
    calculator: "strided". If the innermost dimension of a large operand is not that of the result, one of the two is not coalesced:
    "transpose".
    """
    found = "elementwise"
    sizes, strides = result.sizes, result.strides
    for tensor in inputs:
        if tensor.sizes == sizes and tensor.strides == strides:
            continue
        if tensor.numel <= 1:
            if tensor.device == "cuda":  # every thread reads it; a number on the host is an argument of the kernel
                found = "strided"
            continue
        if tensor.is_contiguous and result.is_contiguous and tensor.numel == result.numel:
            continue
        found = "strided"
        if 4 * moved(tensor) >= moved(result):
            one, other = _fastest(tensor), _fastest(result)
            if one is not None and other is not None and one[0] != other[0]:
                return "transpose"
    if found == "elementwise" and not result.is_dense:
        return "strided"
    return found


def _fastest(tensor: Tensor) -> tuple[int, int] | None:
    """The innermost dimension in memory, counted from the last, and its stride."""
    best: tuple[int, int] | None = None
    for place, (size, stride) in enumerate(zip(reversed(tensor.sizes), reversed(tensor.strides), strict=True)):
        if size > 1 and stride and (best is None or stride < best[1]):
            best = (place, stride)
    return best


def row_of(tensor: Tensor, dim: int | list[int] | None) -> int:
    """The number of elements along these dimensions, or of the whole tensor if none are given."""
    if not tensor.sizes:
        return 1
    if dim is None or dim == []:
        return max(tensor.numel, 1)
    dims = dim if isinstance(dim, list) else [dim]
    return max(math.prod(tensor.sizes[d] for d in dims), 1)
