"""Embedding, gathering, scattering and concatenation.

Kernels follow EmbeddingBackwardKernel.cu, EmbeddingBag.cu, Indexing.cu, IndexKernel.cu, ScatterGatherKernel.cu, Shape.cu of
ATen/native/cuda. Which rows an index selects depends on values: they are assumed to be distinct, and to be read from memory.
"""

from __future__ import annotations

import math

from maya_core.hardware.dtypes import HALVES
from maya_core.hardware.platform import Platform
from maya_core.ops.cub import bits, radix_sort, scan, unique_by_key
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.kernel import Copy, Kernel, Streaming, small
from maya_core.ops.reductions import add_reduction
from maya_core.ops.registry import aten, op, values
from maya_core.ops.tensor_iterator import INT32_MAX
from maya_core.ops.traffic import SECTOR, moved, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor, tensors_in

SMALL_EMBEDDING = 3072  # up to this many indices are gathered by one kernel without sorting
ROWS_PER_THREAD = 10  # EmbeddingBackwardKernel.cu's NROWS_PER_THREAD
ATOMIC_BLOCKS_PER_SM = 4  # MAX_ATOMIC_ACCUM_BLOCKS_PER_SM
MAX_BLOCK = 1024
CAT_BATCH = 128  # tensors that CatArrayBatchedCopy concatenates in one launch
MAX_MODE = 2  # of embedding bags


def _picked(count: int, row: int, item: int) -> int:
    """The bytes read for `count` rows at arbitrary places, in whole sectors."""
    return count * max(row * item, min(SECTOR, 4 * item))


# ---- gathering ----
@op(*aten("index_select", "embedding"))
def rows_picked(call: Call, platform: Platform) -> Work:
    result, indices = call.results[0], call.inputs[-1]
    row = result.numel // max(indices.numel, 1)
    return Work().launch(streaming("gather", [result, indices], [result], row=row))


def _gather(result: Tensor, indices: list[Tensor], row: int) -> Streaming:
    read = _picked(result.numel // row, row, result.itemsize) + sum(map(moved, indices))
    return Streaming("gather", read, moved(result), result.numel, row)


@op(*aten("gather", "take"))
def elements_picked(call: Call, platform: Platform) -> Work:
    return Work().launch(_gather(call.results[0], call.inputs[1:], 1))


@op(*aten("index", "_unsafe_index"))
def index(call: Call, platform: Platform) -> Work:
    """Indexing; several indices are first copied to one layout."""
    result, indices = call.results[0], list(tensors_in(call["indices"]))
    count = max((tensor.numel for tensor in indices), default=1)
    row = max(1, result.numel // max(count, 1))
    return _one_layout(Work(), indices).out(0).launch(_gather(result, indices, row))


def _columns(shapes: list[tuple[int, ...]]) -> list[list[int]]:
    """The sizes of these shapes in each broadcast dimension, last dimension first."""
    rank = max((len(shape) for shape in shapes), default=0)
    return [[shape[-1 - d] for shape in shapes if len(shape) > d] for d in range(rank)]


def _broadcast(indices: list[Tensor]) -> list[Tensor]:
    """The indices broadcast to their common shape, with strides of 0."""
    shape = tuple(max(column) for column in reversed(_columns([index.sizes for index in indices])))
    each = []
    for index in indices:
        missing = len(shape) - len(index.sizes)
        sizes, strides = (1,) * missing + index.sizes, (0,) * missing + index.strides
        expanded = tuple(0 if a != b else s for a, b, s in zip(sizes, shape, strides, strict=True))
        each.append(index._replace(sizes=shape, strides=expanded))
    return each


def _one_layout(work: Work, indices: list[Tensor]) -> Work:
    """Copies indices so that all have the same layout, are long and on the device (TensorAdvancedIndexing.cpp, make_info)."""
    for each in indices:
        if each.dtype == "Int" or each.device != "cuda":
            work.temporary(8 * each.numel)
            work.launch(streaming("strided", [each], [each]))
    spread = _broadcast(indices)
    if len({each.strides for each in spread}) > 1:
        for each in spread:
            if not each.is_contiguous:
                work.temporary(8 * each.numel)
                work.launch(streaming("strided", [each], [each._replace(dtype="Long").packed()]))
    return work


# ---- scattering ----
def _scattered(source: Tensor | None, index: Tensor | None, target: Tensor, row: int) -> Streaming:
    """A kernel that reads, changes and writes at indices, `row` elements at a time."""
    count = source.numel if source is not None and source.numel > 1 else (index.numel if index is not None else 1) * row
    touched = _picked(max(1, count // row), row, target.itemsize)
    read = touched + (moved(source) if source is not None else 0) + (moved(index) if index is not None else 0)
    return Streaming("scatter", read, touched, count, row)


def _copied_first(call: Call, target: Tensor) -> list[Kernel]:
    """The copy with which out-of-place forms start that ATen implements with the in-place kernel."""
    if call.name not in COPIES_FIRST:
        return []
    return [Copy("d2d", target.nbytes) if target.is_dense else streaming("strided", [target], call.results[:1])]


COPIES_FIRST = aten("scatter", "scatter_add", "index_add", "index_copy")


@op(*aten("scatter", "scatter_add", "scatter_", "scatter_add_", "scatter_reduce_"))
def scatter(call: Call, platform: Platform) -> Work:
    target = call["self"]
    kernel = _scattered(call.tensor("src"), call.tensor("index"), target, 1)
    return Work().launch(*_copied_first(call, target), kernel)


@op("aten::scatter_reduce")
def scatter_reduce(call: Call, platform: Platform) -> Work:
    """Copies, initializes the targets, and scatters (ScatterGatherKernel.cu)."""
    source, index = call.tensor("src"), call.tensor("index")
    return Work().launch(
        *one_kernel(None, [call["self"]], call.results[:1]),
        streaming("scatter", [index], [source]),
        streaming("scatter", [source, index, source], [source]),
    )


@op(
    *aten(
        "index_add", "index_copy", "index_add_", "index_copy_", "index_fill_", "index_reduce", "index_reduce_", "put_"
    )
)
def rows_scattered(call: Call, platform: Platform) -> Work:
    target, source, index, dim = call["self"], call.tensor("source"), call.tensor("index"), call.get("dim")
    count = index.numel if index is not None else 1
    if source is not None and source.numel > 1:
        row = max(1, source.numel // max(count, 1))
    else:
        row = max(1, target.numel // max(1, target.sizes[dim])) if dim is not None and target.sizes else 1
    return Work().launch(*_copied_first(call, target), _scattered(source, index, target, row))


@op("aten::index_fill")
def index_fill(call: Call, platform: Platform) -> Work:
    index = call.tensor("index")
    return Work().launch(*one_kernel(None, [call["self"]], call.results[:1]), streaming("scatter", [index], [index]))


@op("aten::masked_scatter")
def masked_scatter(call: Call, platform: Platform) -> Work:
    copy = one_kernel(None, [call["self"]], call.results[:1])
    return Work().launch(*copy, streaming("scatter", [call.tensor("mask"), call.tensor("source")], call.results[:1]))


@op("aten::masked_scatter_")
def masked_scatter_in_place(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


# ---- index_put ----
def _check_range(work: Work, platform: Platform, index: Tensor) -> None:
    """Asserts on the device that no index is out of range: reduces to the smallest and largest, and compares and asserts each. Since torch
    2.13 one reduction finds both."""
    for found in (2,) if platform.since(2, 13) else (1, 1):
        ends = [work.temporary(index.itemsize) for _ in range(found)]
        if (copy := work.contiguous(index)) is not None:
            work.free(copy)
        add_reduction(work, index, [], platform, written=8 * found)
        for _ in ends:
            work.free(work.temporary(1))
            work.launch(small(), small())
        work.free(*reversed(ends))


def _linear_index(work: Work, call: Call, platform: Platform, index: Tensor, linear: Streaming) -> int:
    """Wraps an index and multiplies it by its stride; on the host if the index is there."""
    if index.device != "cuda":
        work.launch(Copy("h2d", 8 * index.numel))
        return work.temporary(8 * index.numel)
    if not call.get("unsafe", False):
        _check_range(work, platform, index)
    wrapped, scaled = work.temporary(8 * index.numel), work.temporary(8 * index.numel)
    work.launch(linear, linear).free(wrapped)
    return scaled


def _unindexed(indices: list[Tensor | None], target: Tensor) -> int:
    """The elements of the dimensions without an index, which are written together."""
    kept = (size for d, size in enumerate(target.sizes) if d >= len(indices) or indices[d] is None)
    return math.prod(kept)


@op(*aten("index_put_", "_index_put_impl_", "index_put", "_unsafe_index_put"))
def index_put(call: Call, platform: Platform) -> Work:
    """Writes directly. To accumulate at indices that may repeat, it sorts them first (index_put_with_sort_kernel)."""
    target, value = call["self"], call["values"]
    indices = list(tensors_in(call["indices"]))
    spread = _broadcast(indices)
    n = spread[0].numel if spread else 1
    row = max(1, _unindexed(call["indices"], target))
    touched = _picked(n, row, target.itemsize)
    if not call.get("accumulate", False) or not indices:
        read = moved(value) + sum(map(moved, indices))
        return _one_layout(Work(), indices).launch(Streaming("scatter", read, touched, n * row, row))
    work = Work()
    linear = Streaming("elementwise", 8 * n, 8 * n, n)
    for position, each in enumerate(spread):
        scaled = _linear_index(work, call, platform, each, linear)
        if position:  # added to the earlier indices
            work.launch(linear).free(scaled)
    if not value.is_contiguous or value.numel != n * row:  # expanded
        work.temporary(n * row * value.itemsize)
        work.launch(Streaming("strided", moved(value), n * row * value.itemsize, n * row))
    for _ in ("sorted", "original", "numbering"):
        work.temporary(8 * n)
    work.launch(linear, Streaming("fill", 0, 8 * n, n))  # divided by the size of a slice, and numbered
    radix_sort(work, platform, n, 8, 8, bits(max(0, target.numel // row - 1)))
    return work.launch(Streaming("scatter", moved(value) + touched + 16 * n, touched, n * row, row))


# ---- embedding's gradient ----
def _sort_indices(work: Work, platform: Platform, n: int, item: int, largest: int) -> None:
    """Sorts the indices together with their positions. Both results stay allocated, the unsorted positions are freed."""
    for _ in ("sorted", "original"):
        work.temporary(n * item)
    numbering = work.temporary(n * item)
    work.launch(Streaming("fill", 0, n * item, n))  # arange
    key_bits = bits(largest) if platform.since(2, 13) else 8 * item
    radix_sort(work, platform, n, item, item, key_bits).free(numbering)


def _sum_segments(work: Work, platform: Platform, grad: Tensor, n: int, item: int, weights: int, bags: bool) -> Work:
    """embedding_backward_cuda_kernel: sums the rows of an index in parts of ten, then sums and scatters the parts."""
    width = grad.sizes[-1]
    segments = min(n, weights)
    partials = n // ROWS_PER_THREAD + segments
    work.out(0).launch(Streaming("fill", 0, weights * width * grad.itemsize, weights * width))  # zeroed
    work.temporary(n * item)  # segment offsets
    work.temporary(8)
    keys = work.temporary(n * item)
    unique_by_key(work, platform, n, item).free(keys)
    for _ in ("partials of a segment", "their offsets"):
        work.temporary(segments * item)
    work.launch(Streaming("elementwise", segments * item, segments * item, segments))
    scan(work, platform, segments, item, Streaming("scan", segments * item, segments * item, segments))
    work.temporary(8)
    # the number of partial sums, and their offsets
    work.launch(small(), Streaming("elementwise", 2 * segments * item, partials * item, partials))
    work.temporary(partials * item)
    warped = -(-width // 32) * 32
    grid = -(-segments * warped // min(warped, MAX_BLOCK))
    atomic = not bags and grid < platform.sms * ATOMIC_BLOCKS_PER_SM and partials > grid * 4  # a few long segments
    work.temporary(partials * item if atomic else partials * width * max(4, grad.itemsize))
    summed, moved_bytes = partials * width * 4, n * width * grad.itemsize
    work.launch(
        Streaming("gather", moved_bytes + n * item, summed, n * width, width),
        Streaming("scatter", summed, segments * width * grad.itemsize, partials * width, width),
    )
    if atomic and grad.dtype in HALVES:  # accumulated in float, then copied
        wide = weights * width
        work.temporary(4 * wide)
        work.launch(Streaming("fill", 0, 4 * wide, wide), Streaming("cast", 4 * wide, wide * grad.itemsize, wide))
    return work


@op("aten::embedding_dense_backward")
def embedding_backward(call: Call, platform: Platform) -> Work:
    """Few indices: zeroes, and one kernel gathers. Many: sorts them, and sums the rows of each index in parts."""
    grad, indices, weights = call["grad_output"], call["indices"], call["num_weights"]
    n, result = indices.numel, call.results[0]
    work = Work()
    work.contiguous(indices)
    work.contiguous(grad)
    if n > SMALL_EMBEDDING or call["scale_grad_by_freq"]:
        _sort_indices(work, platform, n, indices.itemsize, weights - 1)
        return _sum_segments(work, platform, grad, n, indices.itemsize, weights, bags=False)
    return _add_rows(work, grad, indices, result)


def _add_rows(work: Work, grad: Tensor, indices: Tensor, result: Tensor) -> Work:
    """Zeroes the result, then adds at the indices."""
    n, width, item = indices.numel, grad.sizes[-1], grad.itemsize
    touched = min(n * width * item, result.nbytes)
    read = n * width * item + touched + moved(indices)
    return work.launch(streaming("fill", [], [result]), Streaming("scatter", read, touched, n * width, width))


@op(*aten("_embedding_bag", "_embedding_bag_forward_only"))
def embedding_bag(call: Call, platform: Platform) -> Work:
    weight, indices = call["weight"], call["indices"]
    row = weight.sizes[-1]
    read = indices.numel * row * weight.itemsize + moved(indices)
    kernel = Streaming("gather", read, sum(map(moved, call.results)), indices.numel * row, row)
    return Work().launch(kernel).out(2, 1, 0, 3)


@op(*aten("_embedding_bag_dense_backward", "_embedding_bag_backward"))
def embedding_bag_backward(call: Call, platform: Platform) -> Work:
    grad, indices, weights = call["grad"], call["indices"], call["num_weights"]
    work = Work()
    work.contiguous(grad)
    if call["mode"] == MAX_MODE:
        return _add_rows(work, grad, indices, call.results[0])
    _sort_indices(work, platform, indices.numel, indices.itemsize, weights - 1)
    return _sum_segments(work, platform, grad, indices.numel, indices.itemsize, weights, bags=True)


@op(*aten("_embedding_bag_per_sample_weights_backward", "embedding_renorm_"))
def of_embedding_rows(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


# ---- concatenation ----
@op(*aten("cat", "_cat"))
def cat(call: Call, platform: Platform) -> Work:
    return Work().launch(*cat_kernels(list(tensors_in(call.arguments[0])), call.results[0]))


def cat_kernels(tensors: list[Tensor], result: Tensor) -> list[Streaming]:
    """One kernel for up to 128 tensors (CatArrayBatchedCopy), or a copy of each."""
    tensors = [tensor for tensor in tensors if tensor.numel > 0]
    batched = (
        len(tensors) > 1
        and len(result.sizes) <= 4
        and result.numel <= INT32_MAX
        and all(tensor.dtype == result.dtype for tensor in tensors)
    )
    if not batched and len(tensors) > 1:
        return [
            streaming(
                "elementwise" if tensor.is_contiguous else "strided", [tensor], [tensor._replace(dtype=result.dtype)]
            )
            for tensor in tensors
        ]
    launches = -(-len(tensors) // CAT_BATCH)
    share = -(-len(tensors) // max(1, launches))
    joined = [tensors[start : start + share] for start in range(0, len(tensors), max(1, share))]
    counts = [sum(tensor.numel for tensor in part) for part in joined]
    return [
        Streaming("cat", sum(map(moved, part)), count * result.itemsize, count)
        for part, count in zip(joined, counts, strict=True)
    ]


@op("aten::unfold_backward")
def unfold_backward(call: Call, platform: Platform) -> Work:
    """Zeroes, numbers the positions, and runs a kernel over them (UnfoldBackwardKernel.cu)."""
    work = Work().out(0)
    work.temporary(8 * call["input_sizes"][call["dim"]])
    grad = call.tensor("grad_in")
    return work.launch(streaming("fill", [], call.results), small(), streaming("scatter", [grad], call.results))


values(
    *aten("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
    mixes_devices=True,
)
