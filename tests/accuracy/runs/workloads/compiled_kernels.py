"""The kernels into which torch.compile fuses the chains of small ops in a Llama block: one each, and one for the gradients.
The published run was compiled. These ops stand for its kernels: they have their inputs and outputs, and no arithmetic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_autograd, register_fake

define("compiled::rotary", "(Tensor x, Tensor angles) -> Tensor")
define("compiled::swiglu", "(Tensor gate, Tensor up) -> Tensor")
define("compiled::swiglu_backward", "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")
define("compiled::rms_norm", "(Tensor x, Tensor weight) -> (Tensor, Tensor)")
define("compiled::add_rms_norm", "(Tensor x, Tensor residual, Tensor weight) -> (Tensor, Tensor, Tensor)")
define("compiled::rms_norm_backward", "(Tensor grad, Tensor x, Tensor scale, Tensor weight) -> (Tensor, Tensor)")
define(
    "compiled::add_rms_norm_backward",
    "(Tensor grad, Tensor to_sum, Tensor x, Tensor scale, Tensor weight) -> (Tensor, Tensor)",
)


def _row_scale(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@register_fake("compiled::rotary")
def _rotary(x: Tensor, angles: Tensor) -> Tensor:
    return torch.empty_like(x)


@register_fake("compiled::swiglu")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@register_fake("compiled::swiglu_backward")
def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


@register_fake("compiled::rms_norm")
def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _row_scale(x)


@register_fake("compiled::add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), _row_scale(x)


@register_fake("compiled::rms_norm_backward")
def _rms_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@register_fake("compiled::add_rms_norm_backward")
def _add_norm_backward(grad: Tensor, to_sum: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _keep_angles(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _keep_norm(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _keep_sum(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(output[0], inputs[2], output[2])


def _rotate_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.compiled.rotary(grad, *ctx.saved_tensors), None


def _swiglu_back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.compiled.swiglu_backward(grad, *ctx.saved_tensors)


def _norm_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, scale = ctx.saved_tensors
    return torch.ops.compiled.rms_norm_backward(grad, x, scale, weight)


def _add_norm_back(ctx: Any, to_sum: Tensor, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, scale = ctx.saved_tensors
    to_input, to_weight = torch.ops.compiled.add_rms_norm_backward(grad, to_sum, x, scale, weight)
    return to_input, to_input, to_weight


register_autograd("compiled::rotary", _rotate_back, setup_context=_keep_angles)
register_autograd("compiled::swiglu", _swiglu_back, setup_context=_keep_inputs)
register_autograd("compiled::rms_norm", _norm_back, setup_context=_keep_norm)
register_autograd("compiled::add_rms_norm", _add_norm_back, setup_context=_keep_sum)


def rotary(x: Tensor, angles: Tensor) -> Tensor:
    return torch.ops.compiled.rotary(x, angles)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.compiled.swiglu(gate, up)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.compiled.rms_norm(x, weight)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    summed, normed, _ = torch.ops.compiled.add_rms_norm(x, residual, weight)
    return summed, normed
