"""Kernels that the published runs took from flash-attn and apex, which need a GPU to build: here each is an op with the
inputs and outputs of the real one and no arithmetic. That is all an emulated device needs: one launch, its reads and writes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_autograd, register_fake

define("flash_attn::rotary", "(Tensor x, Tensor cos, Tensor sin) -> Tensor")
define("flash_attn::cross_entropy", "(Tensor logits, Tensor labels) -> (Tensor, Tensor)")
define("flash_attn::cross_entropy_backward", "(Tensor grad, Tensor(a!) logits, Tensor lse, Tensor labels) -> ()")
define("apex::rms_norm", "(Tensor x, Tensor weight) -> (Tensor, Tensor)")
define("apex::rms_norm_backward", "(Tensor grad, Tensor x, Tensor scale, Tensor weight) -> (Tensor, Tensor)")


@register_fake("flash_attn::rotary")
def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


@register_fake("flash_attn::cross_entropy")
def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(labels.shape, dtype=torch.float32), logits.new_empty(labels.shape, dtype=torch.float32)


@register_fake("flash_attn::cross_entropy_backward")
def _cross_entropy_backward(grad: Tensor, logits: Tensor, lse: Tensor, labels: Tensor) -> None:
    return None


@register_fake("apex::rms_norm")
def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=weight.dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


@register_fake("apex::rms_norm_backward")
def _rms_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_angles(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _rotate_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.flash_attn.rotary(grad, *ctx.saved_tensors), None, None


def _keep_row_scale(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _normalize_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, scale = ctx.saved_tensors
    return torch.ops.apex.rms_norm_backward(grad.contiguous(), x, scale, weight)


register_autograd("flash_attn::rotary", _rotate_back, setup_context=_keep_angles)
register_autograd("apex::rms_norm", _normalize_back, setup_context=_keep_row_scale)


class _CrossEntropy(torch.autograd.Function):
    """The gradient is written over the logits, as flash-attn does with inplace_backward=True."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses, lse = torch.ops.flash_attn.cross_entropy(logits, labels)
        ctx.save_for_backward(logits, lse, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, lse, labels = ctx.saved_tensors
        torch.ops.flash_attn.cross_entropy_backward(grads[0].contiguous(), logits, lse, labels)
        return logits, None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses of all tokens: logits (tokens, vocabulary) in any precision, labels (tokens,)."""
    return _CrossEntropy.apply(logits, labels)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (batch, sequence, heads, width)."""
    return torch.ops.flash_attn.rotary(x, cos, sin)


class RmsNorm(torch.nn.Module):
    """apex's MixedFusedRMSNorm: computes in the precision of its input, answers in that of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.apex.rms_norm(x, self.weight)[0]
