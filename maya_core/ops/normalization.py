"""Normalization and softmax. Follows layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh and SoftMax.cu of ATen/native/cuda."""

from __future__ import annotations

import math
from typing import Any

from maya_core.hardware.platform import Platform
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.kernel import Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.reductions import add_reduction, last_pow2
from maya_core.ops.registry import aten, op
from maya_core.ops.rules import describe
from maya_core.ops.traffic import row_of, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor

LONGEST_VECTORIZED = (
    2**24
)  # largest integers that a float represents exactly: layer_norm_kernel.cu counts elements in a float
MAX_BLOCK = 512  # Normalization.cuh's MAX_BLOCK_SIZE
ACCUMULATOR = 4  # bytes of a moment of halves and floats
WARP_ROW, WARP_ROW_BYTES = 1024, 4096  # SoftMax.cu: longest rows that the registers of one warp hold


# ---- layer norm and RMS norm ----
@op(*aten("native_layer_norm", "_fused_rms_norm"))
def layer_norm(call: Call, platform: Platform) -> Work:
    """One kernel that loads four elements at a time; two kernels, moments first, if the rows do not allow that."""
    source, width = call["input"], math.prod(call["normalized_shape"])
    work = Work()
    work.contiguous(source)
    if width % 4 or width > LONGEST_VECTORIZED or source.dtype == "Double":
        work.launch(streaming("moments", [source], call.results[1:], row=width, elements=source.numel))
    read = [source, call.tensor("weight"), call.tensor("bias")]
    return work.launch(streaming("norm", read, call.results, row=width, elements=source.numel))


@op(*aten("native_layer_norm_backward", "_fused_rms_norm_backward"))
def layer_norm_backward(call: Call, platform: Platform) -> Work:
    """The gradient of the input by rows; those of weight and bias by columns, in two stages for tall inputs."""
    grad, source, mask = call["grad_out"], call["input"], call["output_mask"]
    width = math.prod(call["normalized_shape"])
    rows = source.numel // max(width, 1)
    read, item = source.nbytes + grad.nbytes, grad.itemsize
    work = Work()
    work.contiguous(source)
    work.out(*range(len(call.results))).contiguous(grad)
    if mask[0]:
        work.launch(Streaming("norm_backward", read, source.nbytes, source.numel, width))
    parameters = sum(bool(wanted) for wanted in mask[1:])
    if not parameters:
        return work
    work.launch(Streaming("column_reduction", read, parameters * width * item, source.numel, rows))
    if rows > 64 * 1024 and width // 32 < platform.sms // 2:  # tall: partial sums of blocks of rows, reduced by sum(0)
        parts = min(-(-rows // 32), max(1, 2**20 // (-(-width // 32) * 32)))
        for _ in range(parameters):
            work.temporary(parts * width * item)
        partial = Tensor(grad.dtype, (parts, width), (width, 1), "cuda")
        for _ in range(parameters):
            result = work.temporary(width * item)
            add_reduction(work, partial, [0], platform).free(result)
    return work


# ---- softmax ----
def softmax_pattern(row: float, item: int) -> str:
    return "warp_softmax" if row <= WARP_ROW and row * item <= WARP_ROW_BYTES else "softmax"


@op(*aten("_softmax", "_log_softmax"))
def softmax(call: Call, platform: Platform) -> Work:
    source, dim = call.inputs[0], call["dim"]
    row = row_of(source, dim)
    inner = not source.sizes or dim % len(source.sizes) == len(source.sizes) - 1
    work = Work().out(0)
    work.contiguous(source)
    pattern = softmax_pattern(row, source.itemsize) if inner else "softmax"
    return work.launch(streaming(pattern, [source], call.results, row=row))


@op("aten::_softmax_backward_data")
def softmax_backward(call: Call, platform: Platform) -> Work:
    """Computes grad * output in a separate kernel first."""
    grad, output = call["grad_output"], call["output"]
    work = Work().out(0)
    work.temporary(grad.nbytes)
    work.contiguous(output)
    work.launch(streaming("elementwise", [grad, output], [output]))
    return work.launch(_softmax_gradient(call, output))


@op("aten::_log_softmax_backward_data")
def log_softmax_backward(call: Call, platform: Platform) -> Work:
    grad, output = call["grad_output"], call["output"]
    work = Work().out(0)
    work.contiguous(grad)
    work.contiguous(output)
    return work.launch(_softmax_gradient(call, output))


def _softmax_gradient(call: Call, output: Tensor) -> Streaming:
    return streaming("softmax_backward", [output, output], call.results, row=row_of(output, call["dim"]))


@op(*aten("_masked_softmax", "_masked_softmax_backward"))
def masked_softmax(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results))


# ---- group norm ----
@op("aten::native_group_norm")
def group_norm(call: Call, platform: Platform) -> Work:
    """Computes moments, fuses scale and shift into one factor and one term for each channel, and transforms."""
    source, samples, channels, groups = call["input"], call["N"], call["C"], call["group"]
    item = max(4, source.itemsize)
    row = source.numel // max(samples * groups, 1)
    work = Work().out(0, 1, 2)
    work.launch(Streaming("moments", source.nbytes, 2 * samples * groups * ACCUMULATOR, source.numel, row))
    if source.itemsize < item:
        for _ in ("mean", "rstd"):
            work.temporary(samples * groups * item)
    if (call.get("weight") is not None or call.get("bias") is not None) and call["HxW"] > 1:
        for _ in range(2):
            work.temporary(samples * channels * item)
        work.launch(small(2 * samples * channels * ACCUMULATOR))
    return work.launch(streaming("strided", [source], call.results[:1]))


@op("aten::native_group_norm_backward")
def group_norm_backward(call: Call, platform: Platform) -> Work:
    source, grad, mask = call["input"], call["grad_out"], call["output_mask"]
    samples, channels, groups, elements = call["N"], call["C"], call["group"], call["HxW"]
    item, read = max(4, source.itemsize), source.nbytes + grad.nbytes
    few = small(samples * channels * ACCUMULATOR)
    work = Work().out(*range(len(call.results)))
    for _ in ("ds", "db"):
        work.temporary(samples * channels * item)
    if elements > 1:
        work.launch(Streaming("moments", read, 2 * samples * channels * ACCUMULATOR, source.numel, elements))
    if mask[0]:
        temporaries = [work.temporary(samples * groups * item) for _ in range(2)]
        if call.get("weight") is not None and elements > 1:
            temporaries.insert(0, work.temporary(samples * channels * item))
            work.launch(few)
        work.launch(few, Streaming("strided", read, source.nbytes, source.numel)).free(*reversed(temporaries))
    if any(mask[1:]):
        work.launch(few)
    return work


# ---- batch norm ----
def _by_channels_last_kernels(source: Tensor) -> bool:
    """batch_norm_choose_impl: whether channels are the innermost dimension, as they also are in (N, C)."""
    return source.strides[1] == 1 and source.is_dense


def _channel_row(source: Tensor) -> int:
    return source.numel // max(source.sizes[1], 1)


def _by_channel(source: Tensor) -> str:
    """The kernel for the statistics of channels: by planes, or by columns if channels are the innermost dimension."""
    return "column_reduction" if _by_channels_last_kernels(source) else "channel_reduction"


def _channels_last_grid(source: Tensor) -> tuple[int, int]:
    """flexible_launch_configs for reductions that several blocks may share."""
    channels = source.sizes[1]
    rows = source.numel // channels
    width = min(last_pow2(channels), 32)
    height = min(last_pow2(-(-rows // 16)), MAX_BLOCK // width)
    if width * height != MAX_BLOCK:
        width = min(last_pow2(channels), MAX_BLOCK // height)
    shares = min(-(-rows // (height * 16)), 128)
    return -(-channels // width), shares if shares >= 8 else 1


def _statistics(work: Work, source: Tensor, values: int, kernel: Streaming) -> Work:
    """The statistics kernel. Blocks that share a channel exchange `values` numbers per channel, guarded by semaphores."""
    if _by_channels_last_kernels(source):
        columns, shares = _channels_last_grid(source)
        if shares > 1:
            staging = work.temporary(values * source.sizes[1] * shares * max(4, source.itemsize))
            semaphores = work.temporary(4 * columns)
            work.launch(small()).free(semaphores, staging)
    return work.launch(kernel)


@op(
    *aten(
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
    )
)
def batch_norm(call: Call, platform: Platform) -> Work:
    """Statistics, running statistics and the transformation; in evaluation, the running statistics are prepared."""
    source: Tensor = call["input"]
    channels = source.sizes[1]
    few = small(2 * channels * ACCUMULATOR)
    transform = streaming("elementwise", [source], call.results[:1])
    work = Work().out(0, 1, 2)
    if not call.get("training", True):
        return work.launch(few, few, transform)
    written = 2 * channels * ACCUMULATOR
    kernel = Streaming(_by_channel(source), source.nbytes, written, source.numel, _channel_row(source))
    return _statistics(work, source, 4, kernel).launch(few, transform)


@op("aten::native_batch_norm_backward")
def batch_norm_backward(call: Call, platform: Platform) -> Work:
    source, grad, mask = call["input"], call["grad_out"], call["output_mask"]
    read, row, channels = source.nbytes + grad.nbytes, _channel_row(source), source.sizes[1]
    if not _by_channels_last_kernels(source):
        # The block that summed a channel reads both again to write the gradient.
        return Work().launch(Streaming("channel_reduction", 2 * read, source.nbytes, source.numel, row))
    outputs = list(range(len(call.results)))
    work = Work()
    for _ in ("sum of dy", "of dy * x"):
        work.temporary(channels * max(4, source.itemsize))
    work.out(*(outputs[1:] if mask[0] else outputs))
    kernel = Streaming("column_reduction", read, 2 * channels * ACCUMULATOR, source.numel, row)
    _statistics(work, source, 2, kernel)
    if mask[0]:
        work.launch(Streaming("elementwise", read, source.nbytes, source.numel))
    return work.out(*outputs)


@op("aten::batch_norm_backward")
def batch_norm_backward_with_update(call: Call, platform: Platform) -> Work:
    source, grad = call["input"], call["grad_out"]
    read = source.nbytes + grad.nbytes
    written = 2 * source.sizes[1] * ACCUMULATOR
    return Work().launch(
        Streaming(_by_channel(source), read, written, source.numel, _channel_row(source)),
        Streaming("elementwise", read, source.nbytes, source.numel),
    )


@op(*aten("cudnn_batch_norm", "cudnn_batch_norm_backward"))
def cudnn_batch_norm(call: Call, platform: Platform) -> Work:
    """One persistent kernel for statistics and transformation, which reads the input twice if it does not stay on the chip."""
    tensors = call.inputs[:2] if call.name.endswith("_backward") else call.inputs[:1]
    read = 2 * sum(tensor.nbytes for tensor in tensors)
    kernel = Streaming("channel_reduction", read, tensors[0].nbytes, tensors[0].numel, _channel_row(tensors[0]))
    return Work().launch(kernel)


# ---- SyncBatchNorm ----
@op(*aten("batch_norm_stats", "batch_norm_backward_reduce"))
def synchronized(call: Call, platform: Platform) -> Work:
    """The reductions of SyncBatchNorm on its own rank."""
    source: Tensor = call["input"]
    backward = call.name == "aten::batch_norm_backward_reduce"
    read = source.nbytes + (call["grad_out"].nbytes if backward else 0)
    written = 4 * source.sizes[1] * ACCUMULATOR
    kernel = Streaming(_by_channel(source), read, written, source.numel, _channel_row(source))
    work = Work()
    if _by_channels_last_kernels(source):
        work.out(*range(len(call.results)))
    return _statistics(work, source, 2 if backward else 4, kernel)


@op(*aten("batch_norm_elemt", "batch_norm_backward_elemt", "batch_norm_update_stats", "batch_norm_gather_stats",
          "batch_norm_gather_stats_with_counts", "_weight_norm_interface", "_weight_norm_interface_backward"))  # fmt: skip
def normalized_elementwise(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


def _per_channel(input: torch.Tensor) -> torch.Tensor:
    """Statistics of half types are float, as in at::acc_type."""
    dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    return input.new_empty(input.size(1), dtype=dtype)


@describe(
    "aten::batch_norm_stats", "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
)  # fmt: skip
def channel_statistics(input: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _per_channel(input), _per_channel(input)


@describe("aten::batch_norm_elemt", "aten::_masked_softmax", "aten::_masked_softmax_backward")
def like_first(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(self)


@describe("aten::batch_norm_elemt.out")
def batch_norm_elemt_out(*_: object, out: torch.Tensor) -> torch.Tensor:
    return out


@describe("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad_out: torch.Tensor, input: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor | None, *mask: bool
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    of_input, of_weight, of_bias = mask
    parameter = mean if weight is None else weight
    return (
        torch.empty_like(mean) if of_input else None,
        torch.empty_like(mean) if of_input else None,
        parameter.new_empty(input.size(1)) if of_weight else None,
        parameter.new_empty(input.size(1)) if of_bias else None,
    )


@describe("aten::batch_norm_backward_elemt")
def batch_norm_backward_elemt(grad_out: torch.Tensor, input: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(input)


@describe("aten::_native_batch_norm_legit.out")
def native_batch_norm_out(
    input: torch.Tensor, *given: Any, out: torch.Tensor, save_mean: torch.Tensor, save_invstd: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    _, _, _, _, training, _, _ = given
    statistics = input.size(1) if training else 0
    return out.resize_(input.shape), save_mean.resize_(statistics), save_invstd.resize_(statistics)


@describe("aten::_native_batch_norm_legit.no_stats_out")
def native_batch_norm_no_stats_out(
    input: torch.Tensor, *_: object, out: torch.Tensor, save_mean: torch.Tensor, save_invstd: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return out.resize_(input.shape), save_mean.resize_(input.size(1)), save_invstd.resize_(input.size(1))
