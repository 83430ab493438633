"""Convolutions: cuDNN's kernels, ATen's kernels around them, and the layout of their results.

Kernels follow ConvShared.cpp, DepthwiseConv2d.cu and Convolution.cpp of ATen/native. What cuDNN launches beside its main kernel (changes of
layout, reductions of split work) was measured together with it. The size of its workspace is not published, and counted as zero. A
channels_last input or weight gives a channels_last result; torch's Meta kernel, which does not know the device, makes everything contiguous. On
CUDA, `cudnn_conv_suggest_memory_format` (ATen/native/ConvUtils.h) decides for outputs, and `convolution_backward` for gradients. Checked with
torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from maya_core.hardware.dtypes import dtype
from maya_core.hardware.platform import Platform
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.kernel import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Convolution
from maya_core.ops.lazy_torch import torch
from maya_core.ops.reductions import add_reduction
from maya_core.ops.registry import aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.traffic import relaid, streaming
from maya_core.ops.work import Work
from maya_core.torch_seam.cuda import cudnn_enabled
from maya_core.torch_seam.dispatcher import convolution_shape, memory_format
from maya_core.trace.call import Call, Tensor


def _lies_as(tensor: Tensor, channels_last: bool) -> bool:
    if not channels_last or len(tensor.sizes) < 4:
        return tensor.is_contiguous
    return tensor.permuted(0, *range(2, len(tensor.sizes)), 1).is_contiguous


def _laid(tensor: Tensor, channels_last: bool) -> Tensor:
    order = (0, *range(2, len(tensor.sizes)), 1) if channels_last else tuple(range(len(tensor.sizes)))
    strides, step = [0] * len(order), 1
    for d in reversed(order):
        strides[d] = step
        step *= tensor.sizes[d]
    return tensor._replace(strides=tuple(strides))


def _packed(work: Work, channels_last: bool, *tensors: Tensor) -> list[int]:
    """Copies tensors that do not have the memory format that cuDNN needs, and returns the numbers of the copies."""
    copies = []
    for tensor in tensors:
        if not _lies_as(tensor, channels_last):
            copies.append(work.temporary(tensor.nbytes))
            work.launch(relaid(tensor, _laid(tensor, channels_last)))
    return copies


def _by_depthwise_kernel(call: Call, channels_last: bool) -> bool:
    source, weight = call["input"], call["weight"]
    return (
        not channels_last
        and not call["transposed"]
        and len(source.sizes) == 4
        and 1 < call["groups"] == source.sizes[1]
        and weight.sizes[1] == 1
    )


def _kernel(
    call: Call, source: Tensor, weight: Tensor, result: Tensor, direction: int, channels_last: bool
) -> Convolution:
    """The kernel of a convolution. A transposed one runs as the input gradient of the ordinary one, and the reverse."""
    if call.get("transposed", False):
        source, result = result, source
        direction = {FORWARD: INPUT_GRADIENT, INPUT_GRADIENT: FORWARD}.get(direction, direction)
    return Convolution(
        dtype(source.dtype).rate, direction, source.sizes[0], source.sizes[1], result.sizes[1], call["groups"],
        math.prod(source.sizes[2:]), math.prod(result.sizes[2:]), math.prod(weight.sizes[2:]), int(channels_last),
        math.prod(call["stride"]),
    )  # fmt: skip


def forward_flops(call: Call) -> int:
    weight, result = call["weight"], call.results[0]
    per_output = math.prod(weight.sizes[2:]) * weight.sizes[1]
    answer: int = 2 * (call["input"].numel if call["transposed"] else result.numel) * per_output
    return answer


def backward_flops(call: Call) -> int:
    weight, grad, mask = call["weight"], call["grad_output"], call["output_mask"]
    per_output = math.prod(weight.sizes[2:]) * weight.sizes[1]
    each = 2 * (call["input"].numel if call["transposed"] else grad.numel) * per_output
    answer: int = each * (bool(mask[0]) + bool(mask[1]))
    return answer


@op(*aten("convolution", "convolution_overrideable"), flops=forward_flops)
def forward(call: Call, platform: Platform) -> Work:
    source, weight, result = call["input"], call["weight"], call.results[0]
    channels_last = result.is_channels_last
    depthwise = _by_depthwise_kernel(call, channels_last)  # which also adds the bias
    work = Work()
    if depthwise:
        work.out(0)
    _packed(work, channels_last, source, weight)
    work.launch(_kernel(call, source, weight, result, FORWARD, channels_last))
    if call["bias"] is not None and not depthwise:
        work.launch(streaming("strided", [result, call.tensor("bias")], [result]))
    return work


@op(*aten("cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu"))
def cudnn_forward(call: Call, platform: Platform) -> Work:
    """cuDNN's own ops, which apply the bias and the activation in the same kernel."""
    source, weight, result = call["self"], call["weight"], call.results[0]
    channels_last = result.is_channels_last
    work = Work()
    _packed(work, channels_last, source, weight)
    direction = INPUT_GRADIENT if call.name.endswith("_transpose") else FORWARD
    ends = (result, source) if direction == INPUT_GRADIENT else (source, result)
    return work.launch(_kernel(call, ends[0], weight, ends[1], direction, channels_last))


@op(*aten("convolution_backward", "convolution_backward_overrideable"), flops=backward_flops)
def backward(call: Call, platform: Platform) -> Work:
    grad, source, weight, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    channels_last = any(tensor.is_channels_last for tensor in (*call.results, source, weight))
    # among the outputs that are requested
    places = [sum(map(bool, mask[:i])) if wanted else None for i, wanted in enumerate(mask)]
    work = Work()
    kept: list[int] = []  # copies of the gradient that both kernels use
    source_read, each_packs = source, [grad]
    if len(grad.sizes) == 3:  # before it is viewed as 2d
        _packed(work, False, source)
        kept = _packed(work, False, grad)
        source_read, each_packs = source.packed(), []
    elif channels_last and not grad.is_channels_last:
        kept, each_packs = _packed(work, True, grad), []
    for which in (1, 0) if _by_depthwise_kernel(call, channels_last) else (0, 1):
        place = places[which]
        if place is None:
            continue
        if which == 0:
            work.out(place)
            copies = _packed(work, channels_last, *each_packs, weight)
            work.launch(_kernel(call, source, weight, grad, INPUT_GRADIENT, channels_last))
        else:
            copies = _packed(work, channels_last, *each_packs, source_read)
            work.out(place).launch(_kernel(call, source, weight, grad, WEIGHT_GRADIENT, channels_last))
        work.free(*reversed(copies))
    work.free(*kept)
    if places[2] is not None:
        add_reduction(work.out(places[2]), grad, [0, *range(2, len(grad.sizes))], platform)
    return work


@op(*aten("_conv_depthwise2d", "conv_depthwise3d", "_slow_conv2d_forward", "_slow_conv2d_backward", "slow_conv_dilated2d",
          "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d", "im2col", "col2im"))  # fmt: skip
def by_columns(call: Call, platform: Platform) -> Work:
    """ATen's own convolutions, which are not used while cuDNN is enabled: described as one pass over the data."""
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


values(
    *aten("convolution", "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable",
          "cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu",
          "_conv_depthwise2d", "conv_depthwise3d", "_slow_conv2d_forward", "_slow_conv2d_backward", "slow_conv_dilated2d",
          "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d"),
    heavy=True,
)  # fmt: skip


# ---- results ----
_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}  # torch's names, by number of dimensions


def _as_2d(tensor: torch.Tensor) -> torch.Tensor:
    """1d convolutions run as 2d ones of height 1."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _input_as_2d(input: torch.Tensor) -> torch.Tensor:
    """ATen makes the input of 1d convolutions contiguous first, so that a transposed input does not look like channels_last."""
    return _as_2d(input.contiguous()) if input.dim() == 3 else input


def cudnn_format(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    if not cudnn_enabled() or torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    wanted = getattr(torch, _CHANNELS_LAST.get(weight.dim(), ""), None)
    if wanted is not None and wanted in (memory_format(input), memory_format(weight)):
        answer: torch.memory_format = wanted
        return answer
    return torch.contiguous_format


def _empty(shape: Sequence[int], like: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """`torch.empty` in this memory format; a 3d shape goes through its 4d equivalent."""
    if len(shape) == 3:
        four = [shape[0], shape[1], 1, shape[2]]
        return torch.empty(four, dtype=like.dtype, device="meta", memory_format=format).squeeze(2)
    return torch.empty(list(shape), dtype=like.dtype, device="meta", memory_format=format)


def _check_channels(input: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> None:
    expected = weight.size(0) if transposed else weight.size(1) * groups
    if input.size(1) != expected:
        raise RuntimeError(
            f"Given {'transposed=True, ' if transposed else f'groups={groups}, '}weight of size {list(weight.shape)}, expected "
            f"input{list(input.shape)} to have {expected} channels, but got {input.size(1)} channels instead"
        )


@describe("aten::convolution", "aten::convolution_overrideable")
def convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    _check_channels(input, weight, transposed, groups)
    shape = convolution_shape(
        input, weight, stride, padding, dilation, transposed, groups, output_padding if transposed else None
    )
    return _empty(shape, input, cudnn_format(_input_as_2d(input), _as_2d(weight)))


@describe("aten::convolution_backward", "aten::convolution_backward_overrideable")
def convolution_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes_or_stride: list[int] | None,
    *geometry_and_mask: object,
    output_mask: list[bool] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    # the overrideable form has no bias sizes; the mask is last in both
    mask = output_mask if output_mask is not None else geometry_and_mask[-1]
    assert isinstance(mask, (list, tuple))
    wants_input, wants_weight, wants_bias = mask
    input2, weight2, grad2 = _input_as_2d(input), _as_2d(weight), _as_2d(grad_output)
    format = cudnn_format(input2, weight2)
    if wants_weight:
        input2 = input2.contiguous(memory_format=format)
    if cudnn_enabled():
        grad2 = grad2.contiguous(memory_format=memory_format(input2))
    grad_input = _empty(input.shape, input, cudnn_format(grad2, weight2)) if wants_input else None
    grad_weight = _empty(weight.shape, weight, cudnn_format(input2, grad2)) if wants_weight else None
    channels = grad_output.size(1)
    grad_bias = torch.empty(channels, dtype=grad_output.dtype, device="meta") if wants_bias else None
    return grad_input, grad_weight, grad_bias


@describe("aten::cudnn_convolution")
def cudnn_convolution(self: torch.Tensor, weight: torch.Tensor, *geometry: Any) -> Any:
    padding, stride, dilation, groups = geometry[:4]
    return convolution(self, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)


@describe("aten::cudnn_convolution_transpose")
def cudnn_convolution_transpose(self: torch.Tensor, weight: torch.Tensor, *geometry: Any) -> Any:
    padding, output_padding, stride, dilation, groups = geometry[:5]
    return convolution(self, weight, None, stride, padding, dilation, True, output_padding, groups)


@describe("aten::cudnn_convolution_relu")
def cudnn_convolution_relu(self: torch.Tensor, weight: torch.Tensor, bias: Any, *geometry: Any) -> Any:
    stride, padding, dilation, groups = geometry
    return convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


@describe("aten::cudnn_convolution_add_relu")
def cudnn_convolution_add_relu(self: torch.Tensor, weight: torch.Tensor, z: Any, alpha: Any, *rest: Any) -> Any:
    return cudnn_convolution_relu(self, weight, *rest)
