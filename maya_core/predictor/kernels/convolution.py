"""Convolutions: cuDNN's kernels, and ATen's around them. Follows ConvShared.cpp, DepthwiseConv2d.cu and Convolution.cpp.

What cuDNN launches beside its main kernel (layout changes of its own, reductions of split work) was measured with it.
"""

from __future__ import annotations

import math

from maya_core.device.kernels.call import Tensor
from maya_core.predictor.kernels.kernel import Kernel, Op, bytes_moved, chain, helper, memory, relaid
from maya_core.predictor.kernels.products import dtype_of

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)


def _channels_last(tensor: Tensor) -> bool:
    return len(tensor.sizes) >= 4 and tensor.is_dense and tensor.strides[1] == 1 and not tensor.is_contiguous


def _lies_as(tensor: Tensor, last: bool) -> bool:
    if not last or len(tensor.sizes) < 4:
        return tensor.is_contiguous
    return tensor.permuted(0, *range(2, len(tensor.sizes)), 1).is_contiguous


def _repacked(last: bool, *tensors: Tensor) -> list[Kernel]:
    copies = []
    for tensor in tensors:
        if not _lies_as(tensor, last):
            order = (0, *range(2, len(tensor.sizes)), 1) if last else tuple(range(len(tensor.sizes)))
            strides, step = [0] * len(order), 1
            for d in reversed(order):
                strides[d] = step
                step *= tensor.sizes[d]
            copies.append(relaid(tensor, tensor._replace(strides=tuple(strides))))
    return copies


def _kernel(op: Op, source: Tensor, weight: Tensor, result: Tensor, direction: int, last: bool) -> Kernel:
    """A transposed convolution is the gradient of one from its result to its input, and the other way round."""
    if op["transposed"]:
        source, result = result, source
        direction = {FORWARD: INPUT_GRADIENT, INPUT_GRADIENT: FORWARD}.get(direction, direction)
    sizes = (
        direction, source.sizes[0], source.sizes[1], result.sizes[1], op["groups"], math.prod(source.sizes[2:]),
        math.prod(result.sizes[2:]), math.prod(weight.sizes[2:]), int(last), math.prod(op["stride"]),
    )  # fmt: skip
    return Kernel("convolution", dtype_of(source), sizes)


@chain("convolution", "convolution_overrideable", "cudnn_convolution", "cudnn_convolution_transpose")
def forward(op: Op) -> list[Kernel]:
    source, weight, result = op["input"], op["weight"], op.results[0]
    last = _channels_last(result)
    kernels = [*_repacked(last, source, weight), _kernel(op, source, weight, result, FORWARD, last)]
    if len(kernels) < op.launches:
        kernels.append(memory("strided", [result, op.tensor("bias")], [result]))
    return kernels


@chain("convolution_backward", "convolution_backward_overrideable")
def backward(op: Op) -> list[Kernel]:
    grad, source, weight, mask = op["grad_output"], op["input"], op["weight"], op["output_mask"]
    last = any(_channels_last(tensor) for tensor in (*op.results, source, weight))
    kernels: list[Kernel] = []
    once = _repacked(last, grad)  # whoever wants it takes the same copy, or each its own
    shared = len(grad.sizes) == 3 or (last and not _channels_last(grad))
    if shared:
        kernels += (_repacked(False, source) if len(grad.sizes) == 3 else []) + once
    for which in (0, 1):
        if mask[which]:
            other = weight if which == 0 else source
            again = [] if len(grad.sizes) == 3 and which == 1 else _repacked(last, other)
            kernels += [*([] if shared else once), *again]
            kernels.append(_kernel(op, source, weight, grad, INPUT_GRADIENT if which == 0 else WEIGHT_GRADIENT, last))
    if mask[2]:
        channels = grad.sizes[1]
        if op.launches > len(kernels) + 1:
            kernels.append(helper())
        row = grad.numel // max(channels, 1)
        kernels.append(
            bytes_moved(
                "column_reduction" if last else "reduction", grad.nbytes, channels * grad.itemsize, grad.numel, row
            )
        )
    return kernels
