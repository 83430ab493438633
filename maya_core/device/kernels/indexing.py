"""Embedding and indexing. Follows EmbeddingBackwardKernel.cu, Embedding.cu, EmbeddingBag.cu, Indexing.cu and Shape.cu of ATen/native/cuda."""

from __future__ import annotations

import math

from maya_core.device.kernels.call import HALVES, Call, Tensor, Work, kernel, tensors_in
from maya_core.device.kernels.cub import add_radix_sort, add_scan, add_unique_by_key, bits
from maya_core.device.kernels.iterator import INT32_MAX
from maya_core.device.kernels.reductions import add_input_copy, add_reduction

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
    if (
        not bags and scatter_grid < call.sms * ATOMIC_BLOCKS_PER_SM and partials > scatter_grid * 4
    ):  # few long segments: atomic adds
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
    work = add_input_copy(add_input_copy(Work(launches=0), indices), grad)
    if n <= SMALL_EMBEDDING and not call["scale_grad_by_freq"]:
        work.launches += 2  # zero, scatter
        return work
    _sort_indices(work, call, n, indices.itemsize, weights - 1)
    return _sum_segments(work, call, grad, n, indices.itemsize, weights, bags=False)


@kernel("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> Work:
    return Work(launches=1).out(2, 1, 0, 3)


@kernel("_embedding_bag_dense_backward", "_embedding_bag_backward")
def embedding_bag_backward(call: Call) -> Work:
    grad, indices, weights = call["grad"], call["indices"], call["num_weights"]
    work = add_input_copy(Work(launches=0), grad)
    if call["mode"] == 2:  # max: zeroed, then added to where the maxima were
        work.launches += 2
        return work
    _sort_indices(work, call, indices.numel, indices.itemsize, weights - 1)
    return _sum_segments(work, call, grad, indices.numel, indices.itemsize, weights, bags=True)


@kernel("cat")
def cat(call: Call) -> Work:
    return Work(launches=cat_launches(list(tensors_in(call.arguments[0])), call.results[0]))


def cat_launches(tensors: list[Tensor], result: Tensor) -> int:
    tensors = [tensor for tensor in tensors if tensor.numel > 0]
    batched = (
        len(tensors) > 1
        and len(result.sizes) <= 4
        and result.numel <= INT32_MAX
        and all(tensor.dtype == result.dtype for tensor in tensors)
    )
    return -(-len(tensors) // 128) if batched else len(tensors)


def _broadcast(indices: list[Tensor]) -> list[Tensor]:
    """Indices at the shape they have together, which strides of 0 give them."""
    rank = max((len(index.sizes) for index in indices), default=0)
    shape = tuple(max(column) for column in reversed(_columns([index.sizes for index in indices]))) if rank else ()
    each = []
    for index in indices:
        missing = rank - len(index.sizes)
        sizes, strides = (1,) * missing + index.sizes, (0,) * missing + index.strides
        each.append(
            index._replace(
                sizes=shape, strides=tuple(0 if a != b else s for a, b, s in zip(sizes, shape, strides, strict=True))
            )
        )
    return each


def _add_index_copies(work: Work, indices: list[Tensor]) -> Work:
    """Several indices must have one layout, long and on the device (TensorAdvancedIndexing.cpp, make_info)."""
    for index in indices:
        if index.dtype == "Int" or index.device != "cuda":
            work.temporary(8 * index.numel)
            work.launches += 1
    spread = _broadcast(indices)
    if len({index.strides for index in spread}) > 1:
        for index in spread:
            add_input_copy(work, index._replace(dtype="Long"))
    return work


@kernel("index")
def index(call: Call) -> Work:
    return _add_index_copies(Work(), list(tensors_in(call["indices"]))).out(0)


def _check_range(work: Work, call: Call, index: Tensor) -> None:
    """Asserts on the device that no index is out of range: smallest and largest, each compared and asserted."""
    ends = [work.temporary(index.itemsize) for _ in range(2)]
    copies = work.launches
    add_input_copy(work, index)
    if work.launches > copies:
        work.free(work.last_temporary)
    add_reduction(work, index, [], call)
    for _ in ends:
        work.free(work.temporary(1))
        work.launches += 2
    work.free(*reversed(ends))


def _add_linear_index(work: Work, call: Call, index: Tensor) -> int:
    """One index wrapped and times its stride; on the host if it lies there."""
    if index.device != "cuda":
        work.launches += 1
        return work.temporary(8 * index.numel)
    if not call.get("unsafe", False):
        _check_range(work, call, index)
    wrapped, scaled = work.temporary(8 * index.numel), work.temporary(8 * index.numel)
    work.free(wrapped)
    work.launches += 2
    return scaled


@kernel("index_put_", "_index_put_impl_")
def index_put(call: Call) -> Work:
    """Adding at indices that may repeat sorts them first (index_put_with_sort_kernel)."""
    indices = list(tensors_in(call["indices"]))
    if not call.get("accumulate", False) or not indices:
        return _add_index_copies(Work(), indices)
    target, values = call.inputs[0], call["values"]
    spread = _broadcast(indices)
    n = spread[0].numel
    work = Work(launches=0)
    for position, each in enumerate(spread):
        scaled = _add_linear_index(work, call, each)
        if position:  # added up
            work.launches += 1
            work.free(scaled)
    slice_size = math.prod(target.sizes[d] for d in _unindexed(call["indices"], len(target.sizes)))
    if not values.is_contiguous or values.numel != n * slice_size:  # expanded
        work.temporary(n * slice_size * values.itemsize)
        work.launches += 1
    for _ in ("sorted", "original", "numbering"):
        work.temporary(8 * n)
    work.launches += 3  # divided by the size of a slice; numbered; added
    return add_radix_sort(work, call, n, 8, 8, bits(max(0, target.numel // max(1, slice_size) - 1)))


def _unindexed(indices: list[Tensor | None], rank: int) -> list[int]:
    return [d for d in range(rank) if d >= len(indices) or indices[d] is None]


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
