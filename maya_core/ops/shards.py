"""Packing shards into one buffer and unpacking them, as FSDP does. Follows ATen/native/cuda/TensorShape.cu."""

from __future__ import annotations

import itertools
import math

from maya_core.hardware.platform import Platform
from maya_core.ops.indexing import cat_kernels
from maya_core.ops.kernel import Copy, Streaming
from maya_core.ops.registry import op
from maya_core.ops.traffic import moved, relaid, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor, tensors_in

BLOCK_THREADS = 128
BLOCK_BYTES = BLOCK_THREADS * 16
ADDRESS_BYTES = 8  # addresses, sizes and block numbers are copied to the device as one tensor of longs


def _with_table(work: Work, entries: int, pieces: int, kernel: Streaming) -> Work:
    """Copies the table from the host, then one kernel processes all pieces."""
    work.temporary(entries * ADDRESS_BYTES)
    return work.launch(Copy("h2d", 48 * pieces), kernel)


@op("aten::_chunk_cat")
def chunk_cat(call: Call, platform: Platform) -> Work:
    tensors, chunks, out = list(tensors_in(call["tensors"])), call["num_chunks"], call.get("out")
    result = out or call.results[0]
    dim = call["dim"] % len(tensors[0].sizes)
    dtypes = (tensors[0].dtype, result.dtype)
    castable = dtypes[0] == dtypes[1] or dtypes == ("BFloat16", "Float")
    work = Work()
    if not all(tensor.is_contiguous for tensor in tensors) or not result.is_dense or not castable:
        return _padded_and_joined(work, tensors, result, dim, chunks, makes_result=out is None)
    if out is None:
        work.out(0)
    blocks = 0
    for tensor in tensors:
        in_chunk = -(-tensor.sizes[dim] // chunks) * math.prod(tensor.sizes[dim + 1 :]) * result.itemsize
        blocks += -(-in_chunk // BLOCK_BYTES)
    kernel = Streaming("cat", sum(map(moved, tensors)), moved(result), result.numel)
    return _with_table(work, 6 * len(tensors) + 2 + blocks, len(tensors), kernel)


def _padded_and_joined(
    work: Work, tensors: list[Tensor], result: Tensor, dim: int, chunks: int, makes_result: bool
) -> Work:
    """Without a special kernel: pads each tensor to whole chunks, copies it if no view is possible, and concatenates all."""
    copies, joined = [], []
    for tensor in tensors:
        rows = -(-tensor.sizes[dim] // chunks) * chunks
        if rows != tensor.sizes[dim]:
            padded = tensor._replace(sizes=(*tensor.sizes[:dim], rows, *tensor.sizes[dim + 1 :])).packed()
            copies.append(work.temporary(padded.nbytes))
            work.launch(streaming("fill", [], [padded]), streaming("strided", [tensor], [tensor.packed()]))
            joined.append(padded)
        elif not _is_viewable(tensor, dim):
            copies.append(work.temporary(tensor.nbytes))
            work.launch(relaid(tensor, tensor.packed()))
            joined.append(tensor.packed())
        else:
            joined.append(tensor)
    work.launch(*cat_kernels(joined, result))
    if makes_result:
        work.out(0)
    return work.free(*copies)


def _is_viewable(tensor: Tensor, dim: int) -> bool:
    """Whether the dimensions from `dim` on can be viewed as one."""
    kept = [pair for pair in zip(tensor.sizes[dim:], tensor.strides[dim:], strict=True) if pair[0] != 1]
    return all(stride == inner[0] * inner[1] for (_, stride), inner in itertools.pairwise(kept))


@op("aten::split_with_sizes_copy")
def split_with_sizes_copy(call: Call, platform: Platform) -> Work:
    source, sizes = call["self"], call["split_sizes"]
    outs = list(tensors_in(call.get("out") or []))
    written = sum(map(moved, outs or call.results))
    if not source.is_dense or not all(out.is_dense and out.dtype == source.dtype for out in outs):
        parts = sum(out.numel > 0 for out in outs)
        return Work().launch(*[Streaming("strided", moved(source), written, source.numel).part(max(1, parts))] * parts)
    dim = call["dim"] % len(source.sizes)
    pieces = math.prod(source.sizes[:dim])
    bytes_in_piece = [size * source.strides[dim] * source.itemsize for size in sizes]
    most = platform.sms * platform.threads_per_sm // BLOCK_THREADS * 2
    rounds = -(-sum(-(-nbytes // BLOCK_BYTES) for nbytes in bytes_in_piece) * pieces // most)
    pieces_per_block = min(math.ceil(math.sqrt(rounds)), pieces)
    rounds_per_piece = -(-rounds // pieces_per_block)
    blocks = sum(-(-nbytes // (BLOCK_BYTES * rounds_per_piece)) for nbytes in bytes_in_piece)
    kernel = Streaming("cat", moved(source), written, source.numel)
    return _with_table(Work(), 4 * len(sizes) + 1 + blocks, len(outs or call.results), kernel)
