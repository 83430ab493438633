"""The bytes that kernels move, and the pattern they move them in, read off the tensors they work on."""

from __future__ import annotations

import math
from collections.abc import Iterable

from maya_core.hardware.dtypes import FLOATS
from maya_core.ops.kernel import Streaming
from maya_core.trace.call import Tensor

SECTOR = 32  # bytes that DRAM is read and written by


def moved(tensor: Tensor) -> int:
    """Bytes that reading or writing a whole tensor moves: what is expanded once, what lies scattered by whole sectors."""
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
    """A kernel that reads and writes these tensors; of what is not said, elements are those of the largest result."""
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
        # operands of several floating dtypes are read with a cast each, without vectors (Loops.cuh, LoadWithCast)
        floats = {tensor.dtype for tensor in inputs if tensor.dtype in FLOATS and tensor.sizes}
        if len(floats) > 1 or (floats and result.dtype in FLOATS and result.dtype not in floats):
            return "cast"
    return found


def layout(inputs: Iterable[Tensor], result: Tensor) -> str:
    """How an elementwise kernel walks its operands (Loops.cuh, TensorIterator.cpp).

    All alike: vectorized. Broadcast or with gaps: by an offset calculator, "strided". Where a large operand moves
    fastest along another dimension than the result does, one of the two is not coalesced: "transpose".
    """
    found = "elementwise"
    sizes, strides = result.sizes, result.strides
    for tensor in inputs:
        if tensor.sizes == sizes and tensor.strides == strides:
            continue
        if tensor.numel <= 1:
            if (
                tensor.device == "cuda"
            ):  # a number of the host's is an argument, one on the device is read by every thread
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
    """The dimension that moves fastest in memory, counted from the last, and its stride."""
    best: tuple[int, int] | None = None
    for place, (size, stride) in enumerate(zip(reversed(tensor.sizes), reversed(tensor.strides), strict=True)):
        if size > 1 and stride and (best is None or stride < best[1]):
            best = (place, stride)
    return best


def row_of(tensor: Tensor, dim: int | list[int] | None) -> int:
    """Elements along these dimensions, all of them if none are given."""
    if not tensor.sizes:
        return 1
    if dim is None or dim == []:
        return max(tensor.numel, 1)
    dims = dim if isinstance(dim, list) else [dim]
    return max(math.prod(tensor.sizes[d] for d in dims), 1)
