"""Embedding, gathering, scattering and joining. Follows EmbeddingBackwardKernel.cu, EmbeddingBag.cu, Indexing.cu, IndexKernel.cu, ScatterGatherKernel.cu, Shape.cu and TensorShape.cu of ATen/native/cuda.

Which rows an index names is a matter of values: they are taken to be different ones, and to be read from memory.
"""

from __future__ import annotations

import math

from maya_core.device.kernels.call import Tensor, tensors_in
from maya_core.predictor.kernels.kernel import (
    SECTOR,
    Kernel,
    Op,
    bytes_moved,
    chain,
    contiguous_copy,
    helper,
    memory,
    moved,
)
from maya_core.predictor.kernels.sorting import radix_sort, sort_launches

ROWS_PER_THREAD = 10  # EmbeddingBackwardKernel.cu's NROWS_PER_THREAD


def _picked(count: int, row: int, item: int) -> int:
    """Bytes of `count` rows picked anywhere: whole sectors."""
    return count * max(row * item, min(SECTOR, 4 * item))


@chain("index_select", "embedding")
def rows_picked(op: Op) -> list[Kernel]:
    result = op.results[0]
    indices = op.inputs[-1]
    row = result.numel // max(indices.numel, 1)
    return [memory("gather", [result, indices], [result], row=row)]


@chain("gather", "take", "index")
def elements_picked(op: Op) -> list[Kernel]:
    """Several indices are brought to one layout first (TensorAdvancedIndexing.cpp, make_info)."""
    result = op.results[0]
    indices = list(tensors_in(op["indices"])) if op.name == "index" else op.inputs[1:]
    count = max((tensor.numel for tensor in indices), default=1)
    copies = [memory("strided", [each], [each]) for each in indices] if op.launches > 1 else []
    row = max(1, result.numel // max(count, 1)) if op.name == "index" else 1
    read = _picked(result.numel // row, row, result.itemsize) + sum(map(moved, indices))
    kernel = bytes_moved("gather", read, moved(result), result.numel, row)
    return [*copies[: op.launches - 1], kernel]


def _scattered(source: Tensor | None, index: Tensor | None, target: Tensor, row: int) -> Kernel:
    """Read, changed and written where the index says, `row` elements at a time."""
    count = source.numel if source is not None and source.numel > 1 else (index.numel if index is not None else 1) * row
    touched = _picked(max(1, count // row), row, target.itemsize)
    read = touched + (moved(source) if source is not None else 0) + (moved(index) if index is not None else 0)
    return bytes_moved("scatter", read, touched, count, row)


@chain("scatter", "scatter_add", "scatter_", "scatter_add_")
def scatter(op: Op) -> list[Kernel]:
    target = op["self"]
    index = op.tensor("index")
    kernel = _scattered(op.tensor("src"), index, target, 1)
    if op.get("src") is None and index is not None:
        kernel = _scattered(None, index, target, 1)
    return [*_copy_of(op, target), kernel]


@chain("index_add", "index_copy", "index_add_", "index_copy_", "index_fill_", "index_reduce", "put_")
def rows_scattered(op: Op) -> list[Kernel]:
    target = op["self"]
    source = op.tensor("source")
    index = op.tensor("index")
    count = index.numel if index is not None else 1
    row = (
        max(1, source.numel // max(count, 1))
        if source is not None and source.numel > 1
        else _row(target, op.get("dim"))
    )
    return [*_copy_of(op, target), _scattered(source, index, target, row)]


def _row(target: Tensor, dim: int | None) -> int:
    if dim is None or not target.sizes:
        return 1
    return max(1, target.numel // max(1, target.sizes[dim]))


def _copy_of(op: Op, target: Tensor) -> list[Kernel]:
    """Out-of-place variants copy first."""
    if op.launches < 2:
        return []
    if target.is_dense:
        return [Kernel("copy", "d2d", (target.nbytes,))]
    return [memory("strided", [target], op.results[:1])]


@chain("index_put_", "_index_put_impl_")
def index_put(op: Op) -> list[Kernel]:
    """Written straight, or sorted first so that what falls on one place is added in order (index_put_with_sort_kernel)."""
    target, values = op["self"], op["values"]
    indices = list(tensors_in(op["indices"]))
    count = math.prod(_broadcast_shape([index.sizes for index in indices]))
    row = max(
        1, math.prod(size for d, size in enumerate(target.sizes) if d >= len(op["indices"]) or op["indices"][d] is None)
    )
    touched = _picked(count, row, target.itemsize)
    index_bytes = sum(map(moved, indices))
    if not op.get("accumulate", False):
        copies = [memory("strided", [each], [each]) for each in indices][: op.launches - 1]
        return [*copies, bytes_moved("scatter", moved(values) + index_bytes, touched, count * row, row)]
    added = bytes_moved("scatter", moved(values) + touched + 16 * count, touched, count * row, row)
    linear = bytes_moved("elementwise", 8 * count, 8 * count, count)
    checks = [] if op.get("unsafe", False) else [bytes_moved("reduction", 8 * count, 16, count, count), *[helper()] * 4]
    prepared: list[Kernel] = []
    for place, index in enumerate(indices):
        if index.device == "cuda":
            prepared += [*checks, linear, linear]
        else:
            prepared.append(Kernel("copy", "h2d", (8 * index.numel,)))
        if place:
            prepared.append(linear)
    if not values.is_contiguous or values.numel != count * row:
        prepared.append(bytes_moved("strided", moved(values), count * row * values.itemsize, count * row))
    numbered = bytes_moved("fill", 0, 8 * count, count)
    sort = radix_sort(count, 8, 8, op.launches - len(prepared) - 3)
    return [*prepared, linear, numbered, *sort, added]


def _broadcast_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    return tuple(max(shape[-1 - d] for shape in shapes if len(shape) > d) for d in range(rank))


@chain("embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward")
def embedding_backward(op: Op) -> list[Kernel]:
    """Few indices: zeroed and gathered by one kernel. Many: sorted, rows of one index summed in parts, the parts scattered."""
    bags = op.name != "embedding_dense_backward"
    grad, indices, result = op["grad" if bags else "grad_output"], op["indices"], op.results[0]
    item, width = grad.itemsize, grad.sizes[-1]
    n = indices.numel
    copies = [*([] if bags else contiguous_copy(indices)), *contiguous_copy(grad)]
    zeroed = memory("fill", [], [result])
    left = op.launches - len(copies)
    if left <= 2:
        touched = min(n * width * item, result.nbytes)
        return [
            *copies,
            zeroed,
            bytes_moved("scatter", n * width * item + touched + moved(indices), touched, n * width, width),
        ]
    segments = min(n, op["num_weights"])
    partials = n // ROWS_PER_THREAD + segments
    numbers = indices.itemsize
    after = [
        zeroed,
        helper(), bytes_moved("scan", 2 * n * numbers, 2 * n * numbers, n),  # unique by key
        bytes_moved("elementwise", segments * numbers, segments * numbers, segments),
        helper(), bytes_moved("scan", segments * numbers, segments * numbers, segments),
        helper(), bytes_moved("elementwise", 2 * segments * numbers, partials * numbers, partials),
        bytes_moved("gather", n * width * item + n * numbers, partials * width * 4, n * width, width),
        bytes_moved("scatter", partials * width * 4, segments * width * item, partials * width, width),
    ]  # fmt: skip
    sorting = left - 1 - len(after)
    if sorting > 1 and sorting - 2 == sort_launches(op["num_weights"] - 1):  # halves added in float, and copied
        sorting -= 2
        wide = result.numel * 4
        after += [bytes_moved("fill", 0, wide, result.numel), bytes_moved("cast", wide, result.nbytes, result.numel)]
    return [*copies, bytes_moved("fill", 0, n * numbers, n), *radix_sort(n, numbers, numbers, sorting), *after]


@chain("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(op: Op) -> list[Kernel]:
    weight, indices = op["weight"], op["indices"]
    row = weight.sizes[-1]
    read = indices.numel * row * weight.itemsize + moved(indices)
    return [bytes_moved("gather", read, sum(map(moved, op.results)), indices.numel * row, row)]


@chain("cat", "_cat")
def cat(op: Op) -> list[Kernel]:
    """Up to 128 tensors by one kernel (CatArrayBatchedCopy), or a copy of each."""
    tensors = [tensor for tensor in tensors_in(op.arguments[0]) if tensor.numel]
    result = op.results[0]
    if op.launches == len(tensors) and len(tensors) > 1:
        return [
            memory(
                "elementwise" if tensor.is_contiguous else "strided", [tensor], [tensor._replace(dtype=result.dtype)]
            )
            for tensor in tensors
        ]
    share = -(-len(tensors) // op.launches)
    parts = [tensors[start : start + share] for start in range(0, len(tensors), share)]
    return [
        bytes_moved(
            "cat", sum(map(moved, part)), sum(t.numel for t in part) * result.itemsize, sum(t.numel for t in part)
        )
        for part in parts
    ]


@chain("_chunk_cat", "split_with_sizes_copy")
def shards(op: Op) -> list[Kernel]:
    """A table of addresses from the host, then one kernel over all pieces; without one, a copy of each."""
    if op.name == "_chunk_cat":
        pieces = list(tensors_in(op["tensors"]))
        whole = op.tensor("out") or op.results[0]
        read, written, count = sum(map(moved, pieces)), moved(whole), whole.numel
    else:
        pieces = list(tensors_in(op.get("out") or [])) or op.results
        read, written, count = moved(op["self"]), sum(map(moved, pieces)), op["self"].numel
    if op.launches == 2:
        return [Kernel("copy", "h2d", (48 * len(pieces),)), bytes_moved("cat", read, written, count)]
    parts = op.launches
    return [bytes_moved("strided", read / parts, written / parts, count / parts)] * parts


@chain("nonzero", "masked_select")
def compacted(op: Op) -> list[Kernel]:
    """Counted, the count read back, compacted; of nonzero the places are then taken apart (Nonzero.cu)."""
    source = op.inputs[-1]
    flags = source.nbytes
    read = sum(map(moved, op.inputs))
    written = sum(map(moved, op.results))
    kernels = [
        bytes_moved("reduction", flags, 1024, source.numel, source.numel), helper(), Kernel("copy", "d2h", (4,)),
        helper(1024), bytes_moved("scan", read, written, source.numel),
    ]  # fmt: skip
    if op.name == "nonzero":
        kernels.append(bytes_moved("elementwise", written, written, sum(r.numel for r in op.results)))
    return kernels
