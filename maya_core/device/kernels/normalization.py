"""Normalization kernels. Follows layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh, SoftMax.cu."""

from __future__ import annotations

import math

from maya_core.device.kernels.call import Call, Tensor, Work, kernel
from maya_core.device.kernels.reductions import add_reduction


@kernel("native_layer_norm_backward", "_fused_rms_norm_backward")
def layer_norm_backward(call: Call) -> Work:
    grad, shape, mask = call["grad_out"], call["normalized_shape"], call["output_mask"]
    width = math.prod(shape)
    rows = grad.numel // max(width, 1)
    work = Work(launches=int(mask[0])).out(*range(len(call.results)))
    parameters = sum(bool(wanted) for wanted in mask[1:])
    if not parameters:
        return work
    work.launches += 1  # weight and bias gradients
    if rows > 64 * 1024 and width // 32 < call.sms // 2:  # tall: partial sums per block of rows, reduced by sum(0)
        parts = min(-(-rows // 32), max(1, 2**20 // width))
        item = grad.itemsize
        for _ in range(parameters):
            work.temporary(parts * width * item)
        partial = Tensor(grad.dtype, (parts, width), (width, 1), "cuda")
        for _ in range(parameters):
            result = work.temporary(width * item)
            add_reduction(work, partial, [0], call)
            work.free(result)
    return work


@kernel("_softmax_backward_data")
def softmax_backward(call: Call) -> Work:
    work = Work(launches=2).out(0)
    work.temporary(call["grad_output"].nbytes)  # grad * output, in a kernel of its own
    return work


@kernel("native_group_norm")
def group_norm(call: Call) -> Work:
    return Work(launches=2 if call.get("weight") is None else 3)


@kernel("native_group_norm_backward")
def group_norm_backward(call: Call) -> Work:
    return Work(launches=5)
