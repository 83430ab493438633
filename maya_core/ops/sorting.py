"""Sorting, top-k and prefix sums. Follows Sort.cpp, SortStable.cu, TensorTopK.cu, ScanKernels.cpp of ATen/native/cuda."""

from __future__ import annotations

import math

from maya_core.hardware.platform import Platform
from maya_core.ops import cub
from maya_core.ops.kernel import Copy, Kernel, Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import Assume, aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.traffic import moved, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor

SMALL_SORT = 4096  # should_use_small_sort
LONG_SEGMENT, MANY_SEGMENTS = 1_000_000, 128
TOPK_THREADS, TOPK_BLOCKS_PER_SM = 256, 6  # 40 of the 64 Ki registers for each thread

# TensorTopK.cu's should_use_multiblock: the largest number of slices, and the length from which several blocks share a slice.
MULTIBLOCK_TOPK = [(20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400)]


def _length(source: Tensor, dim: int) -> int:
    return source.sizes[dim] if source.sizes else 1


def _copied(source: Tensor) -> Kernel:
    return Copy("d2d", source.nbytes) if source.is_dense else streaming("strided", [source], [source])


@op("aten::sort")
def sort(call: Call, platform: Platform) -> Work:
    source: Tensor = call.inputs[0]
    dim = call.get("dim", -1)
    length, n, item = _length(source, dim), source.numel, source.itemsize
    work = Work().out(0, 1).launch(_copied(source))
    if not source.sizes:
        return work.launch(small(8))
    if length <= SMALL_SORT:  # copies, numbers, then one kernel sorts in place
        work.free(work.temporary(8 * length))
        work.launch(small(8 * length), Streaming("strided", 8 * length, 8 * n, n), _copied(source))
        pairs = n * (item + 8)
        return work.launch(Streaming("sort", pairs, pairs, n, length)) if length > 1 else work
    turned = not (
        source.is_dense and source.strides[dim] == 1
    )  # sorted in a copy with the dimension last, and copied back
    if turned:
        for nbytes in (source.nbytes, source.nbytes, 8 * n):
            work.temporary(nbytes)
    _sort_long(work, platform, source, n // length)
    if turned:
        work.launch(*(Streaming("transpose", n * each, n * each, n) for each in (item, item, 8)))
    return work


def _sort_long(work: Work, platform: Platform, source: Tensor, segments: int) -> Work:
    """launch_stable_sort_kernel: a sort for each of a few long segments, one sort for all, or a block for each of many segments."""
    n, item = source.numel, source.itemsize
    length = n // segments
    work.launch(Streaming("fill", 0, 8 * n, n))  # numbered
    if segments == 1 or length >= LONG_SEGMENT:
        order = work.temporary(8 * length)
        for _ in range(segments):
            cub.radix_sort(work, platform, length, item, 8, 8 * item)
        return work.free(order)
    if segments >= MANY_SEGMENTS:
        order = work.temporary(8 * n)
        return cub.segmented_sort(work, n, item, 8, length).free(order)
    # sorts everything by value, then stably by segment
    for _ in range(2):
        work.temporary(8 * n)
    keys = work.temporary(source.nbytes)
    cub.radix_sort(work, platform, n, item, 8, 8 * item).free(keys)
    cub.radix_sort(work, platform, n, 8, 0, cub.bits(segments - 1))
    return work.launch(Streaming("gather", 2 * n * (item + 8), n * (item + 8), n))  # reordered


@op("aten::topk")
def topk(call: Call, platform: Platform) -> Work:
    """One block for each slice selects; for long slices, all blocks count digits of 8 bits (TensorTopK.cu)."""
    source: Tensor = call.inputs[0]
    written = sum(map(moved, call.results))
    length = _length(source, call.get("dim", -1))
    if source.numel == 0 or not source.sizes:
        return Work().launch(Streaming("select", 2 * source.nbytes, written, source.numel, length))
    slices, digits, k = source.numel // length, source.itemsize, call["k"]
    work = Work().out(0, 1)
    work.contiguous(source)
    least = next(shortest for most, shortest in MULTIBLOCK_TOPK if slices <= most)
    if length >= least:
        _share_slices(work, platform, source, slices, length, written)
    else:  # reads the whole slice for each digit
        work.launch(Streaming("select", source.nbytes * (1 + digits), written, source.numel, length))
    if call.get("sorted", True) and k > 1:
        work.launch(Streaming("sort", written, written, slices * k, k))
    return work


def _share_slices(work: Work, platform: Platform, source: Tensor, slices: int, length: int, written: int) -> None:
    item = source.itemsize
    per_thread = -(-source.numel // (platform.sms * TOPK_BLOCKS_PER_SM * TOPK_THREADS))
    blocks = slices * -(-length // (max(4, min(per_thread, 64)) * TOPK_THREADS))
    for nbytes in (item * slices, 8 * slices, 8 * slices, 512 * blocks, 1024 * slices, 4 * blocks, 4 * blocks):
        work.temporary(nbytes)
    few = small(1024 * slices)
    counts = Streaming("reduction", source.nbytes, 1024 * slices, source.numel, length)
    # A fill, and three kernels for each digit of 8 bits.
    work.launch(small(8 * slices), few, small(4 * slices), *[counts, few, few] * item, few)
    for _ in range(2):
        work.free(work.temporary(1279))
        work.launch(small(), few)
    work.launch(Streaming("select", source.nbytes, written, source.numel, length))


@op(*aten("_cummax_helper", "_cummin_helper"))
def running_extreme(call: Call, platform: Platform) -> Work:
    """One kernel of ATen, for every shape."""
    source = call.inputs[0]
    row = _length(source, call.get("dim", 0))
    flat = bool(source.sizes) and source.numel == row
    return Work().launch(streaming("scan", [source], call.results or [source], row=0 if flat else row))


@op(*aten("cumsum", "cumprod", "logcumsumexp", "_logcumsumexp", "cumsum_", "cumprod_"))
def scan(call: Call, platform: Platform) -> Work:
    source = call.inputs[0]
    result = call.results[0] if call.results else source
    row = _length(source, call.get("dim", 0))
    flat = bool(source.sizes) and source.numel == row
    kernel = streaming("scan", [result], call.results or [source], row=0 if flat else row)
    if not source.sizes:
        return Work().launch(kernel)
    work = Work().out(*range(len(call.results[:1])))
    if source.dtype != result.dtype or not source.is_contiguous:
        work.temporary(source.numel * result.itemsize)
        work.launch(streaming("cast" if source.dtype != result.dtype else "strided", [source], [result]))
    return cub.scan(work, platform, source.numel, result.itemsize, kernel) if flat else work.launch(kernel)


values(*aten("topk", "sort"), assume=Assume.RANDOM_INDICES)


# ---- results ----
@describe("aten::_logcumsumexp")
def logcumsumexp(self: torch.Tensor, dim: int) -> torch.Tensor:
    return self.new_empty(self.shape)


@describe("aten::_logcumsumexp.out")
def logcumsumexp_out(self: torch.Tensor, dim: int, *, out: torch.Tensor) -> torch.Tensor:
    return out.resize_(self.shape)


@describe("aten::_cummax_helper", "aten::_cummin_helper")
def writes_given_tensors(*_: object) -> None: ...
