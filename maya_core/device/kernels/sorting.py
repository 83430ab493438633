"""Sorting, top-k, prefix sums and random orders. Follows Sort.cpp, SortStable.cu, TensorTopK.cu, ScanKernels.cpp, Randperm.cu of ATen/native/cuda."""

from __future__ import annotations

import math

from maya_core.device.kernels.call import Call, Tensor, Work, kernel
from maya_core.device.kernels.cub import add_radix_sort, add_scan, add_segmented_sort, bits
from maya_core.device.kernels.reductions import add_input_copy

SMALL_SORT = 4096  # should_use_small_sort
LONG_SEGMENT, MANY_SEGMENTS = 1_000_000, 128
TOPK_THREADS, TOPK_BLOCKS_PER_SM = 256, 6  # 40 registers a thread of 64 Ki

# TensorTopK.cu's should_use_multiblock: for at most so many slices, the length from which several blocks share one
MULTIBLOCK_TOPK = [(20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400)]


def _length(source: Tensor, dim: int) -> int:
    return source.sizes[dim] if source.sizes else 1


@kernel("sort")
def sort(call: Call) -> Work:
    source: Tensor = call.inputs[0]
    dim = call.get("dim", -1)
    length = _length(source, dim)
    work = Work(launches=1).out(0, 1)  # a copy of the input
    if not source.sizes:
        work.launches = 2
        return work
    if length <= SMALL_SORT:
        work.free(work.temporary(8 * length))
        work.launches = 4 + (length > 1)  # copies and numbering, then one kernel in place
        return work
    if not (source.is_dense and source.strides[dim] == 1):  # sorted beside, with the dimension last, and copied back
        for nbytes in (source.nbytes, source.nbytes, 8 * source.numel):
            work.temporary(nbytes)
        work.launches += 3
    return _sort_long(work, call, source, source.numel // length)


def _sort_long(work: Work, call: Call, source: Tensor, segments: int) -> Work:
    """launch_stable_sort_kernel: one sort for each of few long segments, all at once, or a block for each of many."""
    n, item = source.numel, source.itemsize
    length = n // segments
    work.launches += 1  # numbered
    if segments == 1 or length >= LONG_SEGMENT:
        order = work.temporary(8 * length)
        for _ in range(segments):
            add_radix_sort(work, call, length, item, 8, 8 * item)
        return work.free(order)
    if segments >= MANY_SEGMENTS:
        order = work.temporary(8 * n)
        return add_segmented_sort(work, n, item, 8).free(order)
    # all by value, then stably by segment
    for _ in range(2):
        work.temporary(8 * n)
    keys = work.temporary(source.nbytes)
    add_radix_sort(work, call, n, item, 8, 8 * item)
    work.free(keys)
    add_radix_sort(work, call, n, 8, 0, bits(segments - 1))
    work.launches += 1
    return work


@kernel("topk")
def topk(call: Call) -> Work:
    source: Tensor = call.inputs[0]
    length = _length(source, call.get("dim", -1))
    if source.numel == 0 or not source.sizes:
        return Work()
    slices = source.numel // length
    work = add_input_copy(Work(launches=0).out(0, 1), source)
    least = next(shortest for most, shortest in MULTIBLOCK_TOPK if slices <= most)
    work.launches += 1  # the selection
    if length >= least:
        _share_slices(work, call, source, slices, length)
    if call.get("sorted", True) and call["k"] > 1:
        work.launches += 1
    return work


def _share_slices(work: Work, call: Call, source: Tensor, slices: int, length: int) -> None:
    per_thread = -(-source.numel // (call.sms * TOPK_BLOCKS_PER_SM * TOPK_THREADS))
    blocks = slices * -(-length // (max(4, min(per_thread, 64)) * TOPK_THREADS))
    for nbytes in (
        source.itemsize * slices,
        8 * slices,
        8 * slices,
        512 * blocks,
        1024 * slices,
        4 * blocks,
        4 * blocks,
    ):
        work.temporary(nbytes)
    work.launches += 3 + 3 * source.itemsize + 1  # filled, and three kernels for each digit of 8 bits
    for _ in range(2):
        work.free(work.temporary(1279))
        work.launches += 2


@kernel("cumsum", "cumprod", "logcumsumexp")
def scan(call: Call) -> Work:
    source, result = call.inputs[0], call.results[0]
    work = Work(launches=0).out(0)
    if source.dtype != result.dtype or not source.is_contiguous:
        work.temporary(source.numel * result.itemsize)
        work.launches += 1
    if not source.sizes:
        return Work()  # copied
    if source.numel == _length(source, call.get("dim", 0)):
        return add_scan(work, source.numel, result.itemsize)
    work.launches += 1
    return work


@kernel("randperm")
def randperm(call: Call) -> Work:
    """Random keys are sorted, with enough bits that few are alike."""
    result: Tensor = call.results[0]
    n = result.numel
    key_bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12)))) if n > 1 else 1
    key = 4 if key_bits <= 32 else 8
    work = Work(launches=4).out(0)
    work.free(work.temporary(8))
    for nbytes in (result.nbytes, n * key, n * key):
        work.temporary(nbytes)
    return add_radix_sort(work, call, n, key, result.itemsize, key_bits)


@kernel("bincount")
def bincount(call: Call) -> Work:
    work = Work(launches=5)
    for _ in ("smallest", "largest"):
        work.temporary(call.inputs[0].itemsize)
    return work.out(0)
