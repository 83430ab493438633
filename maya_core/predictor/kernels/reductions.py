"""Reductions: a kernel, before it its semaphores zeroed where blocks share an output. Follows Reduce.cuh and ReduceOps.cpp of ATen/native."""

from __future__ import annotations

from typing import Any

from maya_core.device.kernels.call import Tensor
from maya_core.device.kernels.reductions import KINDS, SMALL_INTEGERS
from maya_core.predictor.kernels.kernel import (
    Kernel,
    Op,
    bytes_moved,
    chain,
    contiguous_copy,
    helper,
    memory,
    moved,
    row_of,
)
from maya_core.predictor.kernels.pointwise import elementwise

OF_TWO = ("max", "min")  # of two tensors they are elementwise


def reduction(source: Tensor, dims: Any, written: float) -> Kernel:
    """The kernel that reduces these dimensions (all, if none): along memory, or down its columns."""
    rank = len(source.sizes)
    reduced = (
        {d % rank for d in (dims if isinstance(dims, list) else [dims])} if rank and dims not in (None, []) else None
    )
    model = "reduction"
    if reduced is not None:
        strides = [(stride, d) for d, stride in enumerate(source.strides) if source.sizes[d] > 1 and stride]
        if strides and min(strides)[1] not in reduced:
            model = "column_reduction"
    return bytes_moved(model, moved(source), written, source.numel, row_of(source, dims))


@chain(*KINDS, "count_nonzero", "hash_tensor", "trace")
def reduce(op: Op) -> list[Kernel]:
    source = op.inputs[0]
    if op.name in OF_TWO and op.overload in ("other", "out") and len(op.inputs) > 1:
        return elementwise(op)
    dims = op.get("dim")
    before: list[Kernel] = []
    if op.name in ("max", "min", "argmax", "argmin") and dims is None:
        before = contiguous_copy(source)
    result = op.results[0] if op.results else None
    cast = None
    if op.name in ("sum", "nansum", "prod") and source.dtype in SMALL_INTEGERS and op.get("dtype") is None:
        cast = "Long"
    elif op.get("dtype") is not None and result is not None and source.itemsize >= 4 and result.dtype != source.dtype:
        cast = result.dtype
    if cast:
        wide = source._replace(dtype=cast)
        before = [memory("cast", [source], [wide])]
        source = wide
    kernel = reduction(source, dims, sum(moved(each) for each in op.results))
    if op.launches == len(before) + 2:
        before = [*before, helper()]
    return [*before, kernel]
