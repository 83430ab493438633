"""Megatron-LM's fused kernels of 2021 (CUDA and JIT-compiled): ops with the inputs and outputs of the real ones and no
arithmetic, which is what an emulated device needs of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_autograd, register_fake

define("megatron::causal_softmax", "(Tensor scores) -> Tensor")
define("megatron::causal_softmax_backward", "(Tensor grad, Tensor probabilities) -> Tensor")
define("megatron::bias_gelu", "(Tensor x, Tensor bias) -> Tensor")
define("megatron::bias_gelu_backward", "(Tensor grad, Tensor x, Tensor bias) -> Tensor")
define("megatron::bias_dropout_add", "(Tensor x, Tensor bias, Tensor residual) -> (Tensor, Tensor)")
define("megatron::dropout_backward", "(Tensor grad, Tensor mask) -> Tensor")


@register_fake("megatron::causal_softmax")
def _causal_softmax(scores: Tensor) -> Tensor:
    return torch.empty_like(scores)


@register_fake("megatron::causal_softmax_backward")
def _causal_softmax_backward(grad: Tensor, probabilities: Tensor) -> Tensor:
    return torch.empty_like(probabilities)


@register_fake("megatron::bias_gelu")
def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@register_fake("megatron::bias_gelu_backward")
def _bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@register_fake("megatron::bias_dropout_add")
def _bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(x, dtype=torch.bool)


@register_fake("megatron::dropout_backward")
def _dropout_backward(grad: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _keep_output(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _keep_inputs(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _keep_mask(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _softmax_back(ctx: Any, grad: Tensor) -> Tensor:
    return torch.ops.megatron.causal_softmax_backward(grad, *ctx.saved_tensors)


def _gelu_back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    to_input = torch.ops.megatron.bias_gelu_backward(grad, *ctx.saved_tensors)
    return to_input, to_input.flatten(0, -2).sum(0)


def _dropout_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    to_input = torch.ops.megatron.dropout_backward(grad, *ctx.saved_tensors)
    return to_input, to_input.flatten(0, -2).sum(0), grad


register_autograd("megatron::causal_softmax", _softmax_back, setup_context=_keep_output)
register_autograd("megatron::bias_gelu", _gelu_back, setup_context=_keep_inputs)
register_autograd("megatron::bias_dropout_add", _dropout_back, setup_context=_keep_mask)


def causal_softmax(scores: Tensor) -> Tensor:
    """Scales, masks and normalizes."""
    return torch.ops.megatron.causal_softmax(scores)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.megatron.bias_gelu(x, bias)


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return torch.ops.megatron.bias_dropout_add(x, bias, residual)[0]
