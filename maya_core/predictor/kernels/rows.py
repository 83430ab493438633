"""Normalization and softmax. Follows layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh and SoftMax.cu of ATen/native/cuda."""

from __future__ import annotations

import math

from maya_core.device.kernels.call import Tensor
from maya_core.predictor.kernels.kernel import Kernel, Op, bytes_moved, chain, contiguous_copy, helper, memory, row_of

ACCUMULATOR = 4  # bytes in which moments of halves and floats are kept
WARP_ROW, WARP_ROW_BYTES = 1024, 4096  # SoftMax.cu: rows up to here are kept in the registers of one warp


def softmax_pattern(row: float, item: int) -> str:
    return "warp_softmax" if row <= WARP_ROW and row * item <= WARP_ROW_BYTES else "softmax"


@chain("native_layer_norm", "_fused_rms_norm")
def layer_norm(op: Op) -> list[Kernel]:
    source = op["input"]
    width = math.prod(op["normalized_shape"])
    copies = contiguous_copy(source)
    whole = memory(
        "norm", [source, op.tensor("weight"), op.tensor("bias")], op.results, row=width, elements=source.numel
    )
    if op.launches == len(copies) + 2:  # moments first, where rows cannot be loaded four at a time
        moments = memory("moments", [source], op.results[1:], row=width, elements=source.numel)
        return [*copies, moments, whole]
    return [*copies, whole]


@chain("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(op: Op) -> list[Kernel]:
    """The gradient of the input row by row; those of weight and bias down the columns, of tall inputs in two stages."""
    grad, source, mask = op["grad_out"], op["input"], op["output_mask"]
    width = math.prod(op["normalized_shape"])
    height = source.numel // max(width, 1)
    kernels = [*contiguous_copy(source), *contiguous_copy(grad)]
    read = source.nbytes + grad.nbytes
    if mask[0]:
        kernels.append(bytes_moved("norm_backward", read, source.nbytes, source.numel, width))
    wanted = sum(map(bool, mask[1:]))
    if wanted:
        kernels.append(bytes_moved("column_reduction", read, wanted * width * grad.itemsize, source.numel, height))
    left = op.launches - len(kernels)
    if left >= wanted > 0:
        parts = min(-(-height // 32), max(1, 2**20 // (-(-width // 32) * 32)))
        partial = bytes_moved(
            "column_reduction", parts * width * grad.itemsize, width * grad.itemsize, parts * width, parts
        )
        semaphores = [helper()] * ((left - wanted) // wanted)
        kernels += [*semaphores, partial] * wanted
    return kernels


@chain("_softmax", "_log_softmax")
def softmax(op: Op) -> list[Kernel]:
    source = op.inputs[0]
    row = row_of(source, op["dim"])
    inner = not source.sizes or op["dim"] % len(source.sizes) == len(source.sizes) - 1
    model = softmax_pattern(row, source.itemsize) if inner else "softmax"
    return [*contiguous_copy(source), memory(model, [source], op.results, row=row)]


@chain("_softmax_backward_data")
def softmax_backward(op: Op) -> list[Kernel]:
    grad, output = op["grad_output"], op["output"]
    row = row_of(output, op["dim"])
    return [
        *contiguous_copy(output),
        memory("elementwise", [grad, output], [output]),
        memory("softmax_backward", [output, output], op.results, row=row),
    ]


@chain("_log_softmax_backward_data")
def log_softmax_backward(op: Op) -> list[Kernel]:
    grad, output = op["grad_output"], op["output"]
    copies = [*contiguous_copy(grad), *contiguous_copy(output)]
    return [*copies, memory("softmax_backward", [output, output], op.results, row=row_of(output, op["dim"]))]


@chain("native_group_norm")
def group_norm(op: Op) -> list[Kernel]:
    source = op["input"]
    samples, channels, groups = op["N"], op["C"], op["group"]
    row = source.numel // max(samples * groups, 1)
    kernels = [bytes_moved("moments", source.nbytes, 2 * samples * groups * ACCUMULATOR, source.numel, row)]
    if op.launches > 2:
        kernels.append(helper(2 * samples * channels * ACCUMULATOR))
    kernels.append(memory("strided", [source], op.results[:1]))
    return kernels


@chain("native_group_norm_backward")
def group_norm_backward(op: Op) -> list[Kernel]:
    source, grad, mask = op["input"], op["grad_out"], op["output_mask"]
    small = op["N"] * op["C"] * ACCUMULATOR
    read = source.nbytes + grad.nbytes
    kernels = []
    if op["HxW"] > 1:
        kernels.append(bytes_moved("moments", read, 2 * small, source.numel, op["HxW"]))
    if mask[0]:
        if op.get("weight") is not None and op["HxW"] > 1:
            kernels.append(helper(small))
        kernels.append(helper(small))
        kernels.append(bytes_moved("strided", read, source.nbytes, source.numel))
    if any(mask[1:]):
        kernels.append(helper(small))
    return kernels


def _channel_row(source: Tensor) -> int:
    return source.numel // max(source.sizes[1], 1)


def _by_channel(source: Tensor) -> str:
    """Statistics of a channel: its planes read one after the other, or down the columns where channels move fastest."""
    return "column_reduction" if source.strides[1] == 1 and source.is_dense else "channel_reduction"


@chain(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update"
)
def batch_norm(op: Op) -> list[Kernel]:
    source = op["input"]
    channels = source.sizes[1]
    small = helper(2 * channels * ACCUMULATOR)
    transform = memory("elementwise", [source], op.results[:1])
    if not op.get("training", True):
        return [*[small] * (op.launches - 1), transform]
    statistics = bytes_moved(
        _by_channel(source), source.nbytes, 2 * channels * ACCUMULATOR, source.numel, _channel_row(source)
    )
    semaphores = [helper()] if op.launches > 3 else []
    return [*semaphores, statistics, small, transform]


@chain("native_batch_norm_backward", "batch_norm_backward")
def batch_norm_backward(op: Op) -> list[Kernel]:
    source, grad = op["input"], op["grad_out"]
    read = source.nbytes + grad.nbytes
    row = _channel_row(source)
    if op.launches == 1:  # both are read again to write the gradient, by the block that summed its channel
        return [bytes_moved("channel_reduction", 2 * read, source.nbytes, source.numel, row)]
    model = "column_reduction" if op.name == "native_batch_norm_backward" else _by_channel(source)
    semaphores = [helper()] if op.launches > 2 else []
    reduce = bytes_moved(model, read, 2 * source.sizes[1] * ACCUMULATOR, source.numel, row)
    return [*semaphores, reduce, bytes_moved("elementwise", read, source.nbytes, source.numel)][: op.launches]


@chain("batch_norm_stats", "batch_norm_backward_reduce")
def synchronized(op: Op) -> list[Kernel]:
    """What SyncBatchNorm reduces on its own rank."""
    source = op["input"]
    read = source.nbytes + (op["grad_out"].nbytes if op.name == "batch_norm_backward_reduce" else 0)
    kernel = bytes_moved(
        _by_channel(source), read, 4 * source.sizes[1] * ACCUMULATOR, source.numel, _channel_row(source)
    )
    return [*([helper()] if op.launches > 1 else []), kernel]


@chain("cudnn_batch_norm", "cudnn_batch_norm_backward")
def cudnn_batch_norm(op: Op) -> list[Kernel]:
    """One persistent kernel: statistics and transformation, the input read twice where it does not stay on the chip."""
    tensors = op.inputs[:2] if op.name.endswith("_backward") else op.inputs[:1]
    read = 2 * sum(tensor.nbytes for tensor in tensors)
    return [bytes_moved("channel_reduction", read, tensors[0].nbytes, tensors[0].numel, _channel_row(tensors[0]))]
