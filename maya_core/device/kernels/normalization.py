"""Normalization kernels. Follows layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh and SoftMax.cu of ATen/native/cuda."""

from __future__ import annotations

import math

from maya_core.device.kernels.call import Call, Tensor, Work, kernel
from maya_core.device.kernels.reductions import add_input_copy, add_reduction

LONGEST_VECTORIZED = 2**24  # integers a float holds exactly: layer_norm_kernel.cu counts elements in one
MAX_BLOCK = 512  # Normalization.cuh's MAX_BLOCK_SIZE


@kernel("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> Work:
    """One kernel that loads four elements at a time; moments and the rest apart where rows do not allow that."""
    width = math.prod(call["normalized_shape"])
    vectorized = width % 4 == 0 and width <= LONGEST_VECTORIZED and call["input"].dtype != "Double"
    return add_input_copy(Work(launches=1 if vectorized else 2), call["input"])


@kernel("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call) -> Work:
    grad, shape, mask = call["grad_out"], call["normalized_shape"], call["output_mask"]
    width = math.prod(shape)
    rows = grad.numel // max(width, 1)
    work = add_input_copy(Work(launches=int(mask[0])), call["input"]).out(*range(len(call.results)))
    add_input_copy(work, grad)
    parameters = sum(bool(wanted) for wanted in mask[1:])
    if not parameters:
        return work
    work.launches += 1  # weight and bias gradients
    if rows > 64 * 1024 and width // 32 < call.sms // 2:  # tall: partial sums per block of rows, reduced by sum(0)
        parts = min(-(-rows // 32), max(1, 2**20 // (-(-width // 32) * 32)))
        item = grad.itemsize
        for _ in range(parameters):
            work.temporary(parts * width * item)
        partial = Tensor(grad.dtype, (parts, width), (width, 1), "cuda")
        for _ in range(parameters):
            result = work.temporary(width * item)
            add_reduction(work, partial, [0], call)
            work.free(result)
    return work


@kernel("_softmax", "_log_softmax")
def softmax(call: Call) -> Work:
    return add_input_copy(Work().out(0), call.inputs[0])


@kernel("_softmax_backward_data")
def softmax_backward(call: Call) -> Work:
    work = Work(launches=2).out(0)
    work.temporary(call["grad_output"].nbytes)  # grad * output, in a kernel of its own
    return add_input_copy(work, call["output"])


@kernel("_log_softmax_backward_data")
def log_softmax_backward(call: Call) -> Work:
    work = add_input_copy(Work().out(0), call["grad_output"])
    return add_input_copy(work, call["output"])


def _group_shape(call: Call) -> tuple[int, int, int, int]:
    """Bytes of one accumulator, samples, channels, elements of a channel."""
    source: Tensor = call["input"]
    return max(4, source.itemsize), call["N"], call["C"], call["HxW"]


@kernel("native_group_norm")
def group_norm(call: Call) -> Work:
    item, samples, channels, elements = _group_shape(call)
    work = Work(launches=2).out(0, 1, 2)  # moments; scale and shift
    if call["input"].itemsize < item:
        for _ in ("mean", "rstd"):
            work.temporary(samples * call["group"] * item)
    affine = call.get("weight") is not None or call.get("bias") is not None
    if affine and elements > 1:  # fused into one factor and one term per channel
        for _ in range(2):
            work.temporary(samples * channels * item)
        work.launches += 1
    return work


@kernel("native_group_norm_backward")
def group_norm_backward(call: Call) -> Work:
    item, samples, channels, elements = _group_shape(call)
    mask, affine = call["output_mask"], call.get("weight") is not None
    work = Work(launches=int(elements > 1)).out(*range(len(call.results)))
    for _ in ("ds", "db"):
        work.temporary(samples * channels * item)
    if mask[0]:
        second, third = (work.temporary(samples * call["group"] * item) for _ in range(2))
        work.launches += 2
        if affine and elements > 1:
            first = work.temporary(samples * channels * item)
            work.launches += 1
            work.free(third, second, first)
        else:
            work.free(third, second)
    if any(mask[1:]):
        work.launches += 1
    return work


def _last_pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1


def _by_channels_last_kernels(source: Tensor) -> bool:
    """batch_norm_choose_impl: channels move fastest, as they also do in (N, C)."""
    return source.strides[1] == 1 and source.is_dense


def _channels_last_grid(source: Tensor) -> tuple[int, int]:
    """flexible_launch_configs for reductions that may be shared by blocks."""
    channels = source.sizes[1]
    rows = source.numel // channels
    width = min(_last_pow2(channels), 32)
    height = min(_last_pow2(-(-rows // 16)), MAX_BLOCK // width)
    if width * height != MAX_BLOCK:
        width = min(_last_pow2(channels), MAX_BLOCK // height)
    shares = min(-(-rows // (height * 16)), 128)
    return -(-channels // width), shares if shares >= 8 else 1


def _add_shared_statistics(work: Work, source: Tensor, values: int) -> None:
    """The statistics kernel; blocks that share a channel meet in `values` numbers per channel, behind semaphores."""
    columns, shares = _channels_last_grid(source)
    work.launches += 1
    if shares > 1:
        staging = work.temporary(values * source.sizes[1] * shares * max(4, source.itemsize))
        semaphores = work.temporary(4 * columns)
        work.launches += 1
        work.free(semaphores, staging)


@kernel(
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update"
)
def batch_norm(call: Call) -> Work:
    source: Tensor = call["input"]
    work = Work(launches=2).out(0, 1, 2)  # running statistics, or those of evaluation; the transformation
    if call.get("training", True) and _by_channels_last_kernels(source):
        _add_shared_statistics(work, source, 4)
    else:
        work.launches += 1
    return work


@kernel("native_batch_norm_backward")
def batch_norm_backward(call: Call) -> Work:
    source: Tensor = call["input"]
    if not _by_channels_last_kernels(source):
        return Work(launches=1)
    mask = call["output_mask"]
    outputs = list(range(len(call.results)))
    work = Work(launches=0)
    for _ in ("sum of dy", "of dy * x"):
        work.temporary(source.sizes[1] * max(4, source.itemsize))
    work.out(*(outputs[1:] if mask[0] else outputs))
    _add_shared_statistics(work, source, 2)
    work.launches += int(mask[0])
    return work.out(*outputs)


@kernel("batch_norm_stats")
def batch_norm_stats(call: Call) -> Work:
    return _synchronized(call, 4)


@kernel("batch_norm_backward_reduce")
def batch_norm_backward_reduce(call: Call) -> Work:
    return _synchronized(call, 2)


def _synchronized(call: Call, values: int) -> Work:
    """What SyncBatchNorm reduces on its own rank."""
    source: Tensor = call["input"]
    if not _by_channels_last_kernels(source):
        return Work()
    work = Work(launches=0).out(*range(len(call.results)))
    _add_shared_statistics(work, source, values)
    return work
