"""Convolutions as cuDNN does them: channels_last in, or channels_last weights, gives channels_last out.

torch's Meta kernel leaves everything contiguous, for want of a device to ask. What counts on CUDA is
`cudnn_conv_suggest_memory_format` (ATen/native/ConvUtils.h) for outputs, and for gradients what
`convolution_backward` (ATen/native/Convolution.cpp) makes of it. Checked on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._meta_registrations import calc_conv_nd_return_shape
from torch._prims_common import suggest_memory_format

from maya_core.device.rules.book import describe

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _as_2d(tensor: torch.Tensor) -> torch.Tensor:
    """1d convolutions run as 2d ones of height 1."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _input_as_2d(input: torch.Tensor) -> torch.Tensor:
    """ATen packs the input of 1d convolutions first, so that a transposed one is not taken for channels_last."""
    return _as_2d(input.contiguous()) if input.dim() == 3 else input


def cudnn_format(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    if not torch._C._get_cudnn_enabled() or torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    wanted = _CHANNELS_LAST.get(weight.dim())
    if wanted is not None and wanted in (suggest_memory_format(input), suggest_memory_format(weight)):
        return wanted
    return torch.contiguous_format


def _empty(shape: Sequence[int], like: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """As `torch.empty` in that format, of a 3d shape by way of its 4d one."""
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
    shape = calc_conv_nd_return_shape(
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
    if torch._C._get_cudnn_enabled():
        grad2 = grad2.contiguous(memory_format=suggest_memory_format(input2))
    grad_input = _empty(input.shape, input, cudnn_format(grad2, weight2)) if wants_input else None
    grad_weight = _empty(weight.shape, weight, cudnn_format(input2, grad2)) if wants_weight else None
    channels = grad_output.size(1)
    grad_bias = torch.empty(channels, dtype=grad_output.dtype, device="meta") if wants_bias else None
    return grad_input, grad_weight, grad_bias


@describe("aten::cudnn_convolution")
def cudnn_convolution(
    self: torch.Tensor,
    weight: torch.Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: bool,
) -> torch.Tensor:
    return convolution(self, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)


@describe("aten::cudnn_convolution_transpose")
def cudnn_convolution_transpose(
    self: torch.Tensor,
    weight: torch.Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    *_: bool,
) -> torch.Tensor:
    return convolution(self, weight, None, stride, padding, dilation, True, output_padding, groups)


@describe("aten::cudnn_convolution_relu")
def cudnn_convolution_relu(
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    return convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


@describe("aten::cudnn_convolution_add_relu")
def cudnn_convolution_add_relu(
    self: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor,
    alpha: float | None,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    return convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


@describe("aten::cudnn_grid_sampler")
def cudnn_grid_sampler(self: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return self.new_empty((self.size(0), self.size(1), grid.size(1), grid.size(2)))


@describe("aten::cudnn_grid_sampler_backward")
def cudnn_grid_sampler_backward(
    self: torch.Tensor, grid: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return self.new_empty(self.shape), grid.new_empty(grid.shape)


@describe("aten::cudnn_affine_grid_generator")
def cudnn_affine_grid_generator(theta: torch.Tensor, n: int, c: int, h: int, w: int) -> torch.Tensor:
    return theta.new_empty((n, h, w, 2))


@describe("aten::cudnn_affine_grid_generator_backward")
def cudnn_affine_grid_generator_backward(grad: torch.Tensor, n: int, c: int, h: int, w: int) -> torch.Tensor:
    return grad.new_empty((n, 2, 3))
