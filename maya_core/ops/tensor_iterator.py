"""The parts of TensorIterator on which launches depend: coalesced dimensions and the split for 32-bit indexing.

Follows ATen/TensorIterator.cpp (reorder_dimensions, coalesce_dimensions, with_32bit_indexing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from maya_core.trace.call import Tensor

INT32_MAX = 2**31 - 1


@dataclass
class Iterator:
    """Shape and byte strides, innermost dimension first; `strides[0]` belongs to the output."""

    shape: list[int]
    strides: list[list[int]]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _before(a: int, b: int, strides: list[list[int]], shape: list[int], reduction: bool) -> bool:
    """Whether dimension `a` must come before `b`, because it is further inside."""
    for operand, each in enumerate(strides):
        if reduction and operand == 0 and (each[a] == 0) != (each[b] == 0):
            return each[a] == 0  # reduced dimensions come first
        if each[a] == 0 or each[b] == 0:
            continue
        if each[a] != each[b]:
            return each[a] < each[b]
        if shape[a] != shape[b]:
            return shape[a] < shape[b]
    return False


def make(shape: list[int], strides: list[list[int]], reduction: bool = False) -> Iterator:
    """The iterator over operands of one shape with these byte strides (0 where broadcast or reduced)."""
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):  # insertion sort, because ambiguous pairs keep their places
        j = i
        while j > 0 and _before(order[j], order[j - 1], strides, shape, reduction):
            order[j], order[j - 1] = order[j - 1], order[j]
            j -= 1
    dims = [shape[d] for d in order]
    each = [[operand[d] for d in order] for operand in strides]
    merged: list[int] = []
    merged_strides: list[list[int]] = [[] for _ in each]
    for index, size in enumerate(dims):
        joins = bool(merged) and (
            merged[-1] == 1
            or size == 1
            or all(m[-1] * merged[-1] == operand[index] for m, operand in zip(merged_strides, each, strict=True))
        )
        if joins:
            if merged[-1] == 1:
                for m, operand in zip(merged_strides, each, strict=True):
                    m[-1] = operand[index]
            merged[-1] *= size
        else:
            merged.append(size)
            for m, operand in zip(merged_strides, each, strict=True):
                m.append(operand[index])
    return Iterator(merged, merged_strides)


def broadcast_strides(tensor: Tensor, shape: tuple[int, ...]) -> list[int]:
    """Byte strides of the tensor when it is broadcast to `shape`."""
    missing = len(shape) - len(tensor.sizes)
    strides = [0] * missing + [
        0 if size == 1 else stride * tensor.itemsize for size, stride in zip(tensor.sizes, tensor.strides, strict=True)
    ]
    return strides


def splits(iterator: Iterator) -> list[Iterator]:
    """The parts for which a kernel is launched separately, so that each can be indexed with 32 bits."""
    fits = iterator.numel <= INT32_MAX and all(
        1 + sum((size - 1) * stride for size, stride in zip(iterator.shape, operand, strict=True)) <= INT32_MAX
        for operand in iterator.strides
    )
    if fits or not iterator.shape:
        return [iterator]
    extents = [max((size - 1) * operand[d] for operand in iterator.strides) for d, size in enumerate(iterator.shape)]
    dim = max(range(len(extents)), key=lambda d: (extents[d], d))
    half = iterator.shape[dim] // 2
    parts = []
    for size in (half, iterator.shape[dim] - half):
        shape = list(iterator.shape)
        shape[dim] = size
        parts += splits(Iterator(shape, iterator.strides))
    return parts


def parts(result: Tensor, inputs: list[Tensor]) -> int:
    """The number of kernels of an elementwise op: one, except for tensors past 2 GiB or 2^31 elements."""
    if result.nbytes < INT32_MAX and all(tensor.nbytes < INT32_MAX for tensor in inputs):
        return 1
    operands = [result] + [tensor for tensor in inputs if tensor.device == "cuda" and tensor.numel > 0]
    strides = [broadcast_strides(tensor, result.sizes) for tensor in operands if len(tensor.sizes) <= len(result.sizes)]
    if any(len(each) != len(result.sizes) for each in strides):
        return 1
    return len(splits(make(list(result.sizes), strides)))
