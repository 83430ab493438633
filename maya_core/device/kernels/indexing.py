"""Embedding and indexing. Follows EmbeddingBackwardKernel.cu, Embedding.cu, EmbeddingBag.cu, Indexing.cu and Shape.cu of ATen/native/cuda."""

from __future__ import annotations

import math

from maya_core.device.kernels.call import HALVES, Call, Tensor, Work, kernel, tensors_in
from maya_core.device.kernels.cub import add_radix_sort, add_scan, add_unique_by_key, bits
from maya_core.device.kernels.reductions import add_reduction

SMALL_EMBEDDING = 3072  # indices up to here are gathered by one kernel without sorting
ROWS_PER_THREAD = 10
ATOMIC_BLOCKS_PER_SM = 4  # MAX_ATOMIC_ACCUM_BLOCKS_PER_SM
MAX_BLOCK = 1024


def _sort_indices(work: Work, call: Call, n: int, item: int, largest: int) -> None:
    """Indices sorted, with where each came from: both stay, the numbering they came from goes."""
    for _ in ("sorted", "original"):
        work.temporary(n * item)
    numbering = work.temporary(n * item)
    work.launches += 1  # arange
    add_radix_sort(work, call, n, item, item, bits(largest))
    work.free(numbering)


def _sum_segments(work: Work, call: Call, grad: Tensor, n: int, item: int, weights: int, bags: bool) -> Work:
    """embedding_backward_cuda_kernel: rows of one index summed in parts of ten, the parts then summed and scattered."""
    width = grad.sizes[-1]
    segments = min(n, weights)
    partials = n // ROWS_PER_THREAD + segments
    work.out(0)
    work.launches += 1  # zeroed
    work.temporary(n * item)  # segment offsets
    work.temporary(8)
    keys = work.temporary(n * item)
    add_unique_by_key(work, call, n, item)
    work.free(keys)
    work.temporary(segments * item)
    work.temporary(segments * item)
    work.launches += 1  # partials per segment
    add_scan(work, segments, item)
    work.temporary(8)
    work.launches += 2  # number of partials, their offsets
    work.temporary(partials * item)
    warped = -(-width // 32) * 32
    scatter_grid = -(-segments * warped // min(warped, MAX_BLOCK))
    if not bags and scatter_grid < call.sms * ATOMIC_BLOCKS_PER_SM and partials > scatter_grid * 4:  # few long segments: atomic adds
        work.temporary(partials * item)
        work.launches += 2
        if grad.dtype in HALVES:  # in float, and copied
            work.temporary(weights * width * 4)
            work.launches += 2
        return work
    work.temporary(partials * width * max(4, grad.itemsize))
    work.launches += 2
    return work


@kernel("embedding_dense_backward")
def embedding_backward(call: Call) -> Work:
    grad, indices, weights = call["grad_output"], call["indices"], call["num_weights"]
    n = indices.numel
    if n <= SMALL_EMBEDDING and not call["scale_grad_by_freq"]:
        return Work(launches=2)  # zero, scatter
    work = Work(launches=0)
    _sort_indices(work, call, n, indices.itemsize, weights - 1)
    return _sum_segments(work, call, grad, n, indices.itemsize, weights, bags=False)


@kernel("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> Work:
    return Work(launches=1).out(2, 1, 0, 3)


@kernel("_embedding_bag_dense_backward", "_embedding_bag_backward")
def embedding_bag_backward(call: Call) -> Work:
    if call["mode"] == 2:  # max: zeroed, then added to where the maxima were
        return Work(launches=2)
    grad, indices, weights = call["grad"], call["indices"], call["num_weights"]
    work = Work(launches=0)
    _sort_indices(work, call, indices.numel, indices.itemsize, weights - 1)
    return _sum_segments(work, call, grad, indices.numel, indices.itemsize, weights, bags=True)


@kernel("cat")
def cat(call: Call) -> Work:
    tensors = [t for t in tensors_in(call.arguments[0]) if t.numel > 0]
    result = call.results[0]
    batched = len(tensors) > 1 and len(result.sizes) <= 4 and all(t.dtype == result.dtype for t in tensors)
    return Work(launches=-(-len(tensors) // 128) if batched else len(tensors))


def _check_range(work: Work, call: Call, index: Tensor) -> None:
    """Asserts on the device that no index is out of range: smallest and largest, each compared and asserted."""
    ends = [work.temporary(index.itemsize) for _ in range(2)]
    add_reduction(work, index, [], call)
    for _ in ends:
        work.free(work.temporary(1))
        work.launches += 2
    work.free(*reversed(ends))


@kernel("index_put_", "_index_put_impl_")
def index_put(call: Call) -> Work:
    """Adding at indices that may repeat sorts them first (index_put_with_sort_kernel)."""
    if not call.get("accumulate", False):
        return Work()
    target, indices = call.inputs[0], list(tensors_in(call["indices"]))
    values: Tensor = call["values"]
    n = math.prod(max(sizes) for sizes in _columns([t.sizes for t in indices])) if indices else 1
    work = Work(launches=0)
    for position, index in enumerate(indices):  # the linear index: wrapped, times its stride, added up
        if not call.get("unsafe", False):
            _check_range(work, call, index)
        wrapped = work.temporary(8 * n)
        scaled = work.temporary(8 * n)
        work.free(wrapped)
        work.launches += 2
        if position:
            work.launches += 1
            work.free(scaled)
    if not values.is_contiguous:
        work.temporary(values.nbytes)
        work.launches += 1
    for _ in ("sorted", "original", "numbering"):
        work.temporary(8 * n)
    work.launches += 2  # divided by the size of a slice; numbered
    indexed = len(indices)
    slice_size = math.prod(target.sizes[indexed:])
    add_radix_sort(work, call, n, 8, 8, bits(max(0, target.numel // max(1, slice_size) - 1)))
    work.launches += 1
    return work


def _columns(shapes: list[tuple[int, ...]]) -> list[list[int]]:
    """Sizes of the dimensions shapes have in common when broadcast, last first."""
    rank = max(len(shape) for shape in shapes)
    return [[shape[-1 - d] for shape in shapes if len(shape) > d] for d in range(rank)]


@kernel("unfold_backward")
def unfold_backward(call: Call) -> Work:
    """Zeroed, and a kernel over the positions it numbers first."""
    work = Work(launches=3).out(0)
    work.temporary(8 * call["input_sizes"][call["dim"]])
    return work
