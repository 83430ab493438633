"""Fake quantization in training. Quantized tensors themselves are not emulated. Follows FakeQuantizeCore.cu of ATen/native."""

from __future__ import annotations

from typing import Any

from maya_core.hardware.platform import Platform
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op
from maya_core.ops.rules import Rules, describe, no_rule_message, rule
from maya_core.ops.work import Work
from maya_core.trace.call import Call


@op(*aten(
    "fake_quantize_per_channel_affine_cachemask", "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "_fake_quantize_learnable_per_channel_affine",
    "_fake_quantize_learnable_per_channel_affine_backward", "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_tensor_affine_backward", "_fused_moving_avg_obs_fq_helper",
))  # fmt: skip
def fake_quantize(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


# ---- results ----
@describe("aten::_fake_quantize_learnable_per_tensor_affine", "aten::_fake_quantize_learnable_per_channel_affine")
def like_first(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(self)


@describe(
    "aten::fake_quantize_per_tensor_affine_cachemask",
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "aten::fake_quantize_per_channel_affine_cachemask",
)
def fake_quantize_cachemask(self: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


@describe(
    "aten::_fake_quantize_learnable_per_tensor_affine_backward",
    "aten::_fake_quantize_learnable_per_channel_affine_backward",
)
def fake_quantize_learnable_backward(
    grad: torch.Tensor, self: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_: object
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(self), torch.empty_like(scale), torch.empty_like(zero_point)


_QUANTIZERS = (
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
)


@rule(*(f"aten::{op}" for op in _QUANTIZERS))
def quantize(rules: Rules, *_: Any) -> torch.Tensor:
    raise NotImplementedError(no_rule_message("aten::quantize_*", "quantized tensors are not emulated"))
