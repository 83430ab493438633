"""Shards packed into one buffer and taken out of it again, as FSDP does. Follows ATen/native/cuda/TensorShape.cu."""

from __future__ import annotations

import itertools
import math

from maya_core.device.kernels.call import Call, Tensor, Work, kernel, tensors_in
from maya_core.device.kernels.indexing import cat_launches

BLOCK_THREADS = 128
BLOCK_BYTES = BLOCK_THREADS * 16
ADDRESS_BYTES = 8  # addresses, sizes and block numbers travel to the device as one tensor of longs


def _with_table(work: Work, entries: int) -> Work:
    work.temporary(entries * ADDRESS_BYTES)
    work.launches += 2  # the table is copied from the host, then the kernel
    return work


@kernel("_chunk_cat")
def chunk_cat(call: Call) -> Work:
    tensors, chunks, out = list(tensors_in(call["tensors"])), call["num_chunks"], call.get("out")
    result = out or call.results[0]
    dim = call["dim"] % len(tensors[0].sizes)
    dtypes = (tensors[0].dtype, result.dtype)
    if (
        not all(tensor.is_contiguous for tensor in tensors)
        or not result.is_dense
        or (dtypes[0] != dtypes[1] and dtypes != ("BFloat16", "Float"))
    ):
        return _padded_and_joined(tensors, result, dim, chunks, makes_result=out is None)
    work = Work(launches=0)
    if out is None:
        work.out(0)
    blocks = 0
    for tensor in tensors:
        in_chunk = -(-tensor.sizes[dim] // chunks) * math.prod(tensor.sizes[dim + 1 :]) * result.itemsize
        blocks += -(-in_chunk // BLOCK_BYTES)
    return _with_table(work, 6 * len(tensors) + 2 + blocks)


def _padded_and_joined(tensors: list[Tensor], result: Tensor, dim: int, chunks: int, makes_result: bool) -> Work:
    """Without a kernel of its own: each tensor padded to whole chunks, or copied where no view will do, and all joined."""
    work = Work(launches=0)
    copies = []
    for tensor in tensors:
        rows = -(-tensor.sizes[dim] // chunks) * chunks
        if rows != tensor.sizes[dim]:
            copies.append(work.temporary(tensor.nbytes // tensor.sizes[dim] * rows))
            work.launches += 2  # filled, and the tensor copied into it
        elif not _is_viewable(tensor, dim):
            copies.append(work.temporary(tensor.nbytes))
            work.launches += 1
    work.launches += cat_launches(tensors, result)
    if makes_result:
        work.out(0)
    return work.free(*copies)


def _is_viewable(tensor: Tensor, dim: int) -> bool:
    """Whether the dimensions from `dim` on can be seen as one."""
    kept = [pair for pair in zip(tensor.sizes[dim:], tensor.strides[dim:], strict=True) if pair[0] != 1]
    return all(stride == inner[0] * inner[1] for (_, stride), inner in itertools.pairwise(kept))


@kernel("split_with_sizes_copy")
def split_with_sizes_copy(call: Call) -> Work:
    source, sizes = call["self"], call["split_sizes"]
    outs = list(tensors_in(call.get("out") or []))
    if not source.is_dense or not all(out.is_dense and out.dtype == source.dtype for out in outs):
        return Work(launches=sum(out.numel > 0 for out in outs))
    dim = call["dim"] % len(source.sizes)
    pieces = math.prod(source.sizes[:dim])
    bytes_in_piece = [size * source.strides[dim] * source.itemsize for size in sizes]
    most = call.sms * call.threads_per_sm // BLOCK_THREADS * 2
    rounds = -(-sum(-(-nbytes // BLOCK_BYTES) for nbytes in bytes_in_piece) * pieces // most)
    pieces_per_block = min(math.ceil(math.sqrt(rounds)), pieces)
    rounds_per_piece = -(-rounds // pieces_per_block)
    blocks = sum(-(-nbytes // (BLOCK_BYTES * rounds_per_piece)) for nbytes in bytes_in_piece)
    return _with_table(Work(launches=0), 4 * len(sizes) + 1 + blocks)
