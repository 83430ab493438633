"""Reductions: gpu_reduce_kernel splits long reductions over blocks, which combine their results in a buffer in global memory.

Follows ATen/native/cuda/Reduce.cuh (setReduceConfig) and ReduceOps.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from maya_core.hardware.dtypes import HALVES
from maya_core.hardware.platform import Platform
from maya_core.ops import tensor_iterator
from maya_core.ops.elementwise import cast_pattern, elementwise
from maya_core.ops.kernel import Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import Assume, Sample, aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.traffic import moved, row_of, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor


def last_pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class ReductionKind:
    """The compile-time parameters of a family of reductions: vt0, its vector width, and the bytes of an accumulator."""

    vt0: int = 4
    accumulator: int | None = None  # None: the size of the input's dtype, at least 4 bytes for halves
    wide_halves: bool = False  # loads halves 8 at a time
    widens: bool = True  # halves are accumulated in float

    def accumulator_bytes(self, source: Tensor) -> int:
        if self.accumulator is not None:
            return self.accumulator
        if source.dtype in HALVES and self.widens:
            return 4
        return source.itemsize


SUM = ReductionKind(wide_halves=True)
MEAN = ReductionKind()
ITSELF = ReductionKind(widens=False)  # a maximum is one of the elements
WITH_INDEX = ReductionKind(accumulator=16)
SMALL_INTEGERS = ("Bool", "Byte", "Char", "Short", "Int")
SUMS = aten("sum", "nansum", "prod")
EXTREMES = aten("max", "min")  # with two tensors they are elementwise
KINDS = {
    f"aten::{name}": kind
    for name, kind in {
        "sum": SUM, "nansum": SUM, "mean": MEAN, "prod": ReductionKind(), "amax": ITSELF, "amin": ITSELF, "max": ITSELF,
        "min": ITSELF, "norm": ReductionKind(accumulator=4), "linalg_vector_norm": ReductionKind(accumulator=4), "all": ReductionKind(accumulator=1),
        "any": ReductionKind(accumulator=1), "var": ReductionKind(vt0=2, accumulator=16), "std": ReductionKind(vt0=2, accumulator=16),
        "var_mean": ReductionKind(vt0=2, accumulator=16), "std_mean": ReductionKind(vt0=2, accumulator=16), "argmax": WITH_INDEX,
        "argmin": WITH_INDEX, "aminmax": ReductionKind(accumulator=8),
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class GlobalReduce:
    """The memory in which blocks that share an output combine their results."""

    buffer_bytes: int
    semaphore_bytes: int


def _vectors(it: tensor_iterator.Iterator, kept: int, inp: list[int], item: int) -> int:
    """The number of adjacent outputs that a thread loads together: it must divide every size and stride."""
    vector = 4
    for number in [it.shape[kept]] + [inp[d] // item for d in range(len(it.shape)) if d != kept]:
        while number % vector:
            vector //= 2
    return vector


def _part(it: tensor_iterator.Iterator, kind: ReductionKind, source: Tensor, platform: Platform) -> GlobalReduce | None:
    out, inp = it.strides[0], it.strides[1]
    reduced = sum(out[d] == 0 for d in range(len(it.shape)))
    outputs = math.prod(it.shape[reduced:])
    inputs = it.numel // outputs
    item = source.itemsize
    on_fastest = reduced == len(it.shape) or inp[0] < inp[reduced]
    dim0, dim1 = (inputs, outputs) if on_fastest else (outputs, inputs)
    fastest = item if not it.shape else inp[0] if on_fastest else inp[reduced]
    vector = 1
    if fastest == item and on_fastest and dim0 >= 128 and reduced == 1:
        dim0 //= 8 if kind.wide_halves and item == 2 else kind.vt0
    elif fastest == item and not on_fastest:
        vector = _vectors(it, reduced, inp, item)
        dim0 //= vector
    threads = (256 if source.dtype == "ComplexDouble" else 512) // vector
    dim0_pow2 = last_pow2(dim0) if dim0 < threads else threads
    dim1_pow2 = last_pow2(dim1) if dim1 < threads else threads
    width = min(dim0_pow2, 32)
    height = min(dim1_pow2, threads // width)
    width = min(dim0_pow2, threads // height)
    step_input, step_output = (width, 1) if on_fastest else (1, width)
    across_warps = _div_up(inputs, step_input) >= min(height * 16, 256)
    if across_warps:
        step_input *= height
    else:
        step_output *= height
    target = platform.sms * (platform.threads_per_sm // (width * height))
    grid = _div_up(outputs // vector, step_output)
    per_thread = _div_up(inputs, step_input)
    if not (across_warps and per_thread >= 256 and grid <= target):
        return None
    ctas = max(min(_div_up(target, grid), _div_up(per_thread, 16)), _div_up(per_thread, 256))
    if ctas <= 1:
        return None
    size = kind.accumulator_bytes(source) * outputs * ctas
    return GlobalReduce(size if on_fastest else size * width * vector, 4 * grid)


def _reduced(source: Tensor, dims: list[int]) -> set[int]:
    rank = len(source.sizes)
    return {d % rank for d in dims} if dims and rank else set(range(rank))


def reduction_parts(
    source: Tensor, dims: list[int], kind: ReductionKind, platform: Platform
) -> list[GlobalReduce | None]:
    """One entry for each kernel: the global memory that it needs, if any."""
    rank = len(source.sizes)
    reduced = _reduced(source, dims)
    kept = 1
    out_strides = [0] * rank
    for d in range(rank - 1, -1, -1):
        if d not in reduced:
            out_strides[d] = kept * source.itemsize
            kept *= source.sizes[d]
    in_strides = [stride * source.itemsize for stride in source.strides]
    whole = tensor_iterator.make(list(source.sizes), [out_strides, in_strides], reduction=True)
    # A kept dimension of size 1 has stride 0, too, but nothing to reduce.
    return [_part(part, kind, source, platform) for part in tensor_iterator.splits(whole)]


def reduction_kernel(source: Tensor, dims: Any, written: float) -> Streaming:
    """The kernel that reduces these dimensions (all of them if none are given): along rows or along columns."""
    rank = len(source.sizes)
    pattern = "reduction"
    if rank and dims not in (None, []):
        reduced = {d % rank for d in (dims if isinstance(dims, list) else [dims])}
        strides = [(stride, d) for d, stride in enumerate(source.strides) if source.sizes[d] > 1 and stride]
        if strides and min(strides)[1] not in reduced:
            pattern = "column_reduction"
    return Streaming(pattern, moved(source), written, source.numel, row_of(source, dims))


def add_reduction(
    work: Work,
    source: Tensor,
    dims: list[int],
    platform: Platform,
    kind: ReductionKind = SUM,
    result: Tensor | None = None,
    written: float | None = None,
) -> Work:
    """Adds the kernels of a reduction and their buffers to work that has already allocated its output (`result`, if its dtype differs)."""
    outputs = source.numel // max(1, math.prod(source.sizes[d] for d in _reduced(source, dims)))
    kernel = reduction_kernel(source, dims, outputs * source.itemsize if written is None else written)
    if source.numel == 0:
        return work.launch(kernel)
    parts = reduction_parts(source, dims, kind, platform)
    between = None
    if len(parts) > 1:  # each part continues with the sum of the one before: in the output, if it is wide enough
        if (result.itemsize if result else source.itemsize) < kind.accumulator_bytes(source):
            between = work.temporary(outputs * kind.accumulator_bytes(source))
        kernel = kernel.part(len(parts))
    for part in parts:
        if part is not None:
            buffer = work.temporary(part.buffer_bytes)
            semaphores = work.temporary(part.semaphore_bytes)
            work.launch(small()).free(semaphores, buffer)  # the semaphores are zeroed first
        work.launch(kernel)
    return work if between is None else work.free(between)


def _as_accumulated(call: Call, source: Tensor) -> Tensor:
    """The input as the reduction reads it: sums of small integers and to other dtypes cast it first, while halves are cast on reading."""
    if call.name in SUMS and source.dtype in SMALL_INTEGERS and call.get("dtype") is None:
        return source._replace(dtype="Long")
    result = call.results[0] if call.results else None
    if call.get("dtype") is not None and result is not None and source.itemsize >= 4 and result.dtype != source.dtype:
        return source._replace(dtype=result.dtype)
    return source


@op(*KINDS)
def reduce(call: Call, platform: Platform) -> Work:
    source, kind = call.inputs[0], KINDS[call.name]
    if call.name in EXTREMES and call.overload in ("other", "out") and len(call.inputs) > 1:
        return elementwise(call, platform)
    dims = call.get("dim")
    work = Work().out(*range(len(call.results)))
    if call.name in (*EXTREMES, "aten::argmax", "aten::argmin") and dims is None:
        work.contiguous(source)
    if call.name in EXTREMES and dims is not None:
        kind = WITH_INDEX
    if (read := _as_accumulated(call, source)) is not source:
        work.temporary(read.nbytes)
        work.launch(streaming(cast_pattern(source.dtype, read.dtype, platform), [source], [read]))
        source = read
    along = dims if isinstance(dims, list) else [] if dims is None else [dims]
    written = sum(moved(each) for each in call.results)
    return add_reduction(work, source, along, platform, kind, call.results[-1] if call.results else None, written)


@op(*aten("count_nonzero", "hash_tensor", "trace", "_aminmax", "segment_reduce", "linalg__powsum"))
def reduced_by_one_kernel(call: Call, platform: Platform) -> Work:
    source = call.inputs[0]
    return Work().launch(reduction_kernel(source, call.get("dim"), sum(moved(each) for each in call.results)))


values(*aten("all", "any", "amax", "amin", "max", "min", "mean"), keeps_uniform=True)
values(*aten("amax", "amin", "max", "min", "mean", "sum", "prod", "cumsum", "cumprod"), sample=Sample.AS_INPUTS)
values(*aten("norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean"), sample=Sample.POSITIVE)
values(*aten("argmax", "argmin", "max.dim", "min.dim", "max.dim_max", "min.dim_min"), assume=Assume.RANDOM_INDICES)


# ---- results ----
@describe("aten::_aminmax")
def aminmax(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return self.new_empty(()), self.new_empty(())


@describe("aten::_aminmax.dim")
def aminmax_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    smallest = torch.amin(self, dim, keepdim)
    return smallest, torch.empty_like(smallest)
