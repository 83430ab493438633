"""Ops without a Meta kernel whose results have shapes one can read off the arguments."""

from __future__ import annotations

from typing import Any

import torch

from maya_core.device.rules.book import Rules, describe, no_rule_message, rule


@describe(
    "aten::_standard_gamma_grad",
    "aten::_dirichlet_grad",
    "aten::_sample_dirichlet",
    "aten::binomial",
    "aten::_masked_softmax",
    "aten::_masked_softmax_backward",
    "aten::_fake_quantize_learnable_per_tensor_affine",
    "aten::_fake_quantize_learnable_per_channel_affine",
)
def like_first(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(self)


@describe("aten::_logcumsumexp")
def contiguous_like_first(self: torch.Tensor, *_: Any) -> torch.Tensor:
    return self.new_empty(self.shape)


@describe("aten::_logcumsumexp.out")
def out_like_first(self: torch.Tensor, *_: Any, out: torch.Tensor) -> torch.Tensor:
    return out.resize_(self.shape)


@describe("aten::_cummax_helper", "aten::_cummin_helper")
def writes_given_tensors(*_: Any) -> None: ...


@describe("aten::fractional_max_pool3d_backward")
def fractional_max_pool3d_backward(grad_output: torch.Tensor, self: torch.Tensor, *_: Any) -> torch.Tensor:
    return self.new_empty(self.shape)


@describe("aten::fractional_max_pool3d_backward.grad_input", "aten::adaptive_avg_pool3d_backward.grad_input")
def grad_input_like_self(
    grad_output: torch.Tensor, self: torch.Tensor, *_: Any, grad_input: torch.Tensor
) -> torch.Tensor:
    return grad_input.resize_(self.shape)


@describe("aten::adaptive_avg_pool2d.out", "aten::adaptive_avg_pool3d.out")
def adaptive_avg_pool_out(self: torch.Tensor, output_size: list[int], *, out: torch.Tensor) -> torch.Tensor:
    return out.resize_([*self.shape[: -len(output_size)], *output_size])


@describe("aten::glu_jvp")
def glu_jvp(glu: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(glu)


@describe("aten::glu_backward_jvp")
def glu_backward_jvp(grad_x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(grad_x)


@describe("aten::_aminmax")
def aminmax(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return self.new_empty(()), self.new_empty(())


@describe("aten::_aminmax.dim")
def aminmax_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    smallest = torch.amin(self, dim, keepdim)
    return smallest, torch.empty_like(smallest)


@describe("aten::_compute_linear_combination")
def compute_linear_combination(input: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    return input.new_empty((coefficients.size(0), *input.shape[1:]))


@describe("aten::_compute_linear_combination.out")
def compute_linear_combination_out(
    input: torch.Tensor, coefficients: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    return out


@describe(
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten::fake_quantize_per_channel_affine_cachemask",
)
def fake_quantize_cachemask(self: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


@describe(
    "aten::_fake_quantize_learnable_per_tensor_affine_backward",
    "aten::_fake_quantize_learnable_per_channel_affine_backward",
)
def fake_quantize_learnable_backward(
    grad: torch.Tensor, self: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(self), torch.empty_like(scale), torch.empty_like(zero_point)


@describe("aten::_transform_bias_rescale_qkv")
def transform_bias_rescale_qkv(qkv: torch.Tensor, qkv_bias: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, ...]:
    batch, length, width = qkv.shape
    shape = (batch, num_heads, length, width // 3 // num_heads)
    return qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(shape)


@describe("aten::_scaled_mm.out", "aten::_scaled_mm_v2.out")
def scaled_mm_out(self: torch.Tensor, mat2: torch.Tensor, *_: Any, out: torch.Tensor) -> torch.Tensor:
    return out.resize_((self.size(0), mat2.size(1)))


@rule("aten::_nested_tensor_from_mask_left_aligned")
def nested_tensor_from_mask_left_aligned(rules: Rules, tensor: torch.Tensor, mask: torch.Tensor) -> bool:
    """Asked by TransformerEncoder in eval mode. No: it then computes with the padding, which takes more time, not less."""
    return False


_QUANTIZERS = (
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
)


@rule(*(f"aten::{op}" for op in _QUANTIZERS))
def quantize(rules: Rules, *_: Any) -> torch.Tensor:
    raise NotImplementedError(no_rule_message("aten::quantize_*", "quantized tensors are not emulated"))


def _check_grouped_operand(matrix: torch.Tensor) -> None:
    """Rows or columns must be packed, and start at multiples of 16 bytes."""
    row, column = matrix.stride()[-2:]
    rows, columns = matrix.shape[-2:]
    if column == 1 and row >= max(1, columns):
        leading = row
    elif row == 1 and column >= max(1, rows):
        leading = column
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {list(matrix.stride())} for strides and {list(matrix.shape)} for sizes"
        )
    if leading * matrix.element_size() % 16:
        raise RuntimeError("strides should be multiple of 16 bytes")


@describe("aten::_grouped_mm")
def grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's Meta kernel wants bfloat16; CUDA multiplies group by group in other types. Rows are padded to 16 bytes."""
    for matrix in (self, mat2):
        _check_grouped_operand(matrix)
    dtype = out_dtype or self.dtype
    rows = self.size(0) if self.dim() == 2 else self.size(1)
    groups = offs.size(0) if self.dim() == mat2.dim() == 2 and offs is not None else self.size(0)
    shape = [rows, mat2.size(-1)] if self.dim() != mat2.dim() else [groups, rows, mat2.size(-1)]
    per_line = 16 // dtype.itemsize
    padded = -(-shape[-1] // per_line) * per_line
    strides = [padded, 1] if len(shape) == 2 else [rows * padded, padded, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
