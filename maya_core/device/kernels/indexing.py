"""Embedding, indexing, sorting and what they launch. Follows EmbeddingBackwardKernel.cu, Indexing.cu, Sort.cu, Shape.cu."""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Tensor, Work, kernel, tensors_in

SMALL_EMBEDDING = 3072  # indices up to here are gathered by one kernel without sorting
ROWS_PER_THREAD = 10


def radix_passes(bits: int) -> int:
    """cub sorts 8 bits a pass."""
    return max(1, -(-bits // 8))


def radix_sort_bytes(n: int, key_bytes: int, value_bytes: int) -> int:
    """cub's one-sweep radix sort of pairs: a second copy of keys and values, and look-back counters per tile of 4608."""
    return n * (key_bytes + value_bytes) + 1024 * -(-n // 4608) + 4607


@kernel("embedding_dense_backward")
def embedding_backward(call: Call) -> Work:
    grad, indices, weights = call["grad_output"], call["indices"], call["num_weights"]
    n, width = indices.numel, grad.sizes[-1]
    if n <= SMALL_EMBEDDING and not call["scale_grad_by_freq"]:
        return Work(launches=2)  # zero, scatter
    item = indices.itemsize
    segments = min(n, weights)
    partials = n // ROWS_PER_THREAD + segments
    work = Work(launches=15 + 2 * radix_passes(max(1, (weights - 1).bit_length())))
    for _ in ("sorted", "original"):
        work.temporary(n * item)
    counting = work.temporary(n * item)
    work.free(work.temporary(radix_sort_bytes(n, item, item)), counting)
    work.out(0)
    work.temporary(n * item)  # segment offsets
    work.temporary(8)
    unique_keys = work.temporary(n * item)
    work.free(work.temporary(1279), unique_keys)
    work.temporary(segments * item)
    work.temporary(segments * item)
    work.free(work.temporary(1279))
    work.temporary(8)
    work.temporary(partials * item)
    work.temporary(partials * (-(-width // 32) * 32) * max(4, grad.itemsize))
    return work


@kernel("cat")
def cat(call: Call) -> Work:
    tensors = [t for t in tensors_in(call.arguments[0]) if t.numel > 0]
    result = call.results[0]
    batched = len(tensors) > 1 and len(result.sizes) <= 4 and all(t.dtype == result.dtype for t in tensors)
    return Work(launches=-(-len(tensors) // 128) if batched else len(tensors))


@kernel("index_put_", "_index_put_impl_")
def index_put(call: Call) -> Work:
    if not call.get("accumulate", False):
        return Work()
    n = max((t.numel for t in tensors_in(call.arguments[1])), default=1)
    work = Work(launches=11 + 2 * 2)
    linear, order = work.temporary(8 * n), work.temporary(8 * n)
    work.free(work.temporary(8 * n))
    work.temporary(8 * n)
    work.free(work.temporary(radix_sort_bytes(n, 8, 8)), linear, order)
    return work


@kernel("sort")
def sort(call: Call) -> Work:
    source: Tensor = call.inputs[0]
    dim = call.get("dim", -1)
    length = source.sizes[dim] if source.sizes else 1
    work = Work().out(0, 1)
    if length <= 1:
        return Work(launches=2).out(0, 1)
    if length <= 4096 and source.numel // length >= 1 and length <= 1024:
        work.launches = 2  # fill the indices, one sorting kernel
        return work
    values, keys = source.numel * 8, source.nbytes
    order = work.temporary(values)
    work.free(work.temporary(keys + values + 1024 * -(-source.numel // 4608) + 4607), order)
    work.launches = 6 + 2 * source.itemsize
    return work


@kernel("randperm")
def randperm(call: Call) -> Work:
    n = call.results[0].numel
    return Work(launches=5 if n < 30000 else 20)
