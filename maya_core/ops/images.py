"""Pooling, padding and resampling of images. Follows DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu, UpSample*.cu,
ReflectionPad.cu and GridSampler.cu of ATen/native/cuda. A gradient to which several outputs add is zeroed first.
"""

from __future__ import annotations

from maya_core.hardware.platform import Platform
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op
from maya_core.ops.rules import describe
from maya_core.ops.traffic import streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor


def _gradient(call: Call) -> Tensor:
    answer: Tensor = call["grad_output"]
    return answer


def _want_images(work: Work, call: Call, source: Tensor, before_output: bool = False) -> Work:
    """Copies images that are neither contiguous nor channels_last, which the kernels need."""
    if not (len(source.sizes) == 4 and source.permuted(0, 2, 3, 1).is_contiguous):
        if not before_output:
            work.out(*range(len(call.results)))
        work.contiguous(source)
    return work


@op(*aten("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "upsample_nearest2d"))
def pooled(call: Call, platform: Platform) -> Work:
    source = call["self"]
    work = _want_images(Work(), call, source, before_output=call.name == "aten::_adaptive_avg_pool2d")
    return work.launch(streaming("pool", [source], call.results))


@op(*aten("max_pool3d_with_indices", "upsample_bilinear2d"))
def pooled_as_it_lies(call: Call, platform: Platform) -> Work:
    return Work().launch(streaming("pool", [call["self"]], call.results))


@op(*aten("avg_pool2d_backward", "upsample_nearest2d_backward"))
def pooled_backward(call: Call, platform: Platform) -> Work:
    grad = _gradient(call)
    return _want_images(Work(), call, grad).launch(streaming("pool", [grad], call.results))


@op("aten::max_pool2d_with_indices_backward")
def max_pool_backward(call: Call, platform: Platform) -> Work:
    grad = _gradient(call)
    work = _want_images(Work(), call, grad)
    return work.launch(streaming("fill", [], call.results), streaming("pool", [grad, call["indices"]], call.results))


@op(*aten("_adaptive_avg_pool2d_backward", "upsample_bilinear2d_backward"))
def spread_backward(call: Call, platform: Platform) -> Work:
    grad = _gradient(call)
    work = _want_images(Work(), call, grad)
    return work.launch(streaming("fill", [], call.results), streaming("scatter", [grad], call.results))


@op(*aten(
    "max_pool3d_with_indices_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward", "upsample_linear1d_backward", "upsample_bicubic2d_backward",
    *(f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)),
))  # fmt: skip
def scattered_backward(call: Call, platform: Platform) -> Work:
    reads = [_gradient(call), call.tensor("indices")]
    return Work().launch(streaming("fill", [], call.results), streaming("scatter", reads, call.results))


@op(*aten("upsample_linear1d", "upsample_bicubic2d"))
def resampled(call: Call, platform: Platform) -> Work:
    return Work().launch(streaming("fill", [], call.results), streaming("pool", [call["self"]], call.results))


@op("aten::grid_sampler_2d_backward")
def grid_sampler_backward(call: Call, platform: Platform) -> Work:
    reads = [call.tensor(name) for name in ("grad_output", "input", "grid")]
    return Work().launch(streaming("fill", [], call.results[:1]), streaming("scatter", reads, call.results[:2]))


@op("aten::avg_pool3d_backward")
def avg_pool3d_backward(call: Call, platform: Platform) -> Work:
    """The kernel uses only the shape of the input."""
    return Work().launch(*one_kernel(None, [_gradient(call)], call.results or call.inputs[:1]))


@op(*aten(
    "_adaptive_avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_avg_pool3d_backward", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "avg_pool3d", "cudnn_grid_sampler", "cudnn_grid_sampler_backward", "fractional_max_pool2d",
    "fractional_max_pool2d_backward", "fractional_max_pool3d", "fractional_max_pool3d_backward", "grid_sampler_2d",
    "grid_sampler_3d", "grid_sampler_3d_backward", "max_unpool2d", "max_unpool3d", "upsample_nearest1d",
    "upsample_nearest1d_backward", "upsample_nearest3d", "upsample_nearest3d_backward", "upsample_trilinear3d",
    "upsample_trilinear3d_backward",
    *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)),
    *(f"_upsample_{kind}_aa{ending}" for kind in ("bicubic2d", "bilinear2d") for ending in ("", "_backward")),
    *(f"_upsample_nearest_exact{n}d{ending}" for n in (1, 2, 3) for ending in ("", "_backward")),
))  # fmt: skip
def pass_over_pixels(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


# ---- results ----
@describe("aten::fractional_max_pool3d_backward")
def fractional_max_pool3d_backward(grad_output: torch.Tensor, self: torch.Tensor, *_: object) -> torch.Tensor:
    return self.new_empty(self.shape)


@describe("aten::fractional_max_pool3d_backward.grad_input", "aten::adaptive_avg_pool3d_backward.grad_input")
def grad_input_like_self(
    grad_output: torch.Tensor, self: torch.Tensor, *_: object, grad_input: torch.Tensor
) -> torch.Tensor:
    return grad_input.resize_(self.shape)


@describe("aten::adaptive_avg_pool2d.out", "aten::adaptive_avg_pool3d.out")
def adaptive_avg_pool_out(self: torch.Tensor, output_size: list[int], *, out: torch.Tensor) -> torch.Tensor:
    return out.resize_([*self.shape[: -len(output_size)], *output_size])


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
