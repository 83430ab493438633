"""Linear, LayerNormLinear and GroupedLinear in 16 and 32 bits, with tensor and sequence parallelism. The order of
products, collectives and frees follows transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear}.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from maya_megatron.engine import norms
from maya_megatron.engine.device import device, product, record


@dataclass(frozen=True)
class LinearSettings:
    """The settings of a layer: how it is split, and its normalization."""

    mode: str | None  # "column", "row"
    group: Any
    tp_size: int
    sequence_parallel: bool
    fuse_wgrad: bool
    norm: str | None = None
    eps: float = 0.0

    @property
    def gathers_input(self) -> bool:
        return self.mode == "column" and self.sequence_parallel and self.tp_size > 1


def gathered(x: torch.Tensor, group: Any, wait: bool = True) -> Any:
    out = torch.empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:], dtype=x.dtype, device=x.device)
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=not wait)
    return out if wait else (out, work)


def scattered(x: torch.Tensor, group: Any, wait: bool = True) -> Any:
    out = torch.empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:], dtype=x.dtype, device=x.device)
    work = dist.reduce_scatter_tensor(out, x, group=group, async_op=not wait)
    return out if wait else (out, work)


def summed(out: torch.Tensor, how: LinearSettings) -> torch.Tensor:
    """The output of a row-parallel layer: the sum over its ranks."""
    if how.mode != "row" or how.tp_size == 1:
        return out
    if how.sequence_parallel:
        return scattered(out, how.group)
    dist.all_reduce(out, group=how.group)
    return out


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: LinearSettings, x: Any, weight: Any, bias: Any, norm_weight: Any, norm_bias: Any) -> Any:
        inputs, statistics = x, ()
        if how.norm:
            inputs, statistics = norms.forward(how.norm, x, norm_weight, norm_bias, how.eps)
        if inputs.dtype != weight.dtype:
            inputs = inputs.to(weight.dtype)
        whole = gathered(inputs, how.group) if how.gathers_input else inputs
        out = torch.empty(*whole.shape[:-1], weight.shape[0], dtype=whole.dtype, device=whole.device)
        product(flat(whole), weight.t(), flat(out))
        del whole
        out = summed(out, how)
        kept = inputs if weight.requires_grad else None
        ctx.save_for_backward(kept, weight, bias, *((x, norm_weight, norm_bias, *statistics) if how.norm else ()))
        ctx.how, ctx.shape, ctx.dtype = how, x.shape, x.dtype
        ctx.weight = (
            weight if how.fuse_wgrad else None
        )  # the parameter object itself; saving would create another tensor of the same memory
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        how: LinearSettings = ctx.how
        inputs, weight, bias, *normed = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[1:4]
        wants_input = wants_input or how.norm is not None
        grad = grad.contiguous()
        if how.mode == "row" and how.sequence_parallel and how.tp_size > 1:
            grad = gathered(grad, how.group)
        arriving = None
        if how.gathers_input and wants_weight:
            inputs, arriving = gathered(inputs, how.group, wait=False)

        dx: Any = None
        leaving = None
        if wants_input:
            dx = torch.empty(*grad.shape[:-1], weight.shape[1], dtype=grad.dtype, device=grad.device)
            product(flat(grad), weight, flat(dx))
            if how.mode == "column" and how.tp_size > 1:
                if how.sequence_parallel:
                    dx, leaving = scattered(dx, how.group, wait=False)
                else:
                    leaving = dist.all_reduce(dx, group=how.group, async_op=True)
        dweight = dbias = None
        if wants_weight:
            if arriving is not None:
                arriving.wait()
            dweight = weight_gradient(grad, inputs, weight, ctx.weight)
        if wants_bias and bias is not None:
            dbias = torch.empty_like(bias)
        del inputs, grad
        if leaving is not None:
            leaving.wait()
        dnorm = dnorm_bias = None
        if how.norm:
            x, norm_weight, norm_bias, *statistics = normed
            dx, dnorm, dnorm_bias = norms.backward(
                how.norm, dx.reshape(ctx.shape), x, norm_weight, norm_bias, statistics
            )
        if dx is not None:
            dx = dx.reshape(ctx.shape).to(ctx.dtype)
        return None, dx, dweight, dbias, dnorm, dnorm_bias


def linear(layer: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
    out: torch.Tensor = _Linear.apply(layer.settings(), x, layer.weight, bias, *layer.norm_parameters())
    return out


def weight_gradient(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, fused: Any) -> Any:
    """The gradient of a weight, or its accumulation into `main_grad` if the layer fuses that."""
    if fused is None:
        return product(flat(grad).t(), flat(inputs), torch.empty_like(weight))
    product(flat(grad).t(), flat(inputs), fused.main_grad)
    return in_place_of_gradient(fused)


def in_place_of_gradient(fused: Any) -> Any:
    """The gradient that autograd receives for a parameter whose gradient is in its `main_grad`."""
    if not hasattr(fused, "grad_added_to_main_grad"):
        return None
    fused.grad_added_to_main_grad = True
    return device().dummy_gradient(fused.shape, fused.dtype)


class _GroupedLinear(torch.autograd.Function):
    """One product for each expert, over its part of the tokens."""

    @staticmethod
    def forward(ctx: Any, layer: Any, splits: list[int], x: Any, *parameters: Any) -> Any:
        count = layer.num_gemms
        weights, biases = parameters[:count], parameters[count:]
        device().workspaces_of_streams()
        out = torch.empty(*x.shape[:-1], weights[0].shape[0], dtype=x.dtype, device=x.device)
        for part, weight, into in zip(flat(x).split(splits), weights, flat(out).split(splits), strict=True):
            if len(part):
                product(part, weight.t(), into)
        ctx.save_for_backward(x if weights[0].requires_grad else None, *weights, *biases)
        ctx.splits, ctx.count = splits, count
        ctx.weights = weights if layer.fuse_wgrad_accumulation else [None] * count
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        grad = grad.contiguous()
        parts = flat(grad).split(ctx.splits)
        dx = None
        if ctx.needs_input_grad[2]:
            dx = torch.empty(*grad.shape[:-1], weights[0].shape[1], dtype=grad.dtype, device=grad.device)
            for part, weight, into in zip(parts, weights, flat(dx).split(ctx.splits), strict=True):
                if len(part):
                    product(part, weight, into)
        dweights = [None] * ctx.count
        if ctx.needs_input_grad[3]:
            pieces = flat(x).split(ctx.splits)
            dweights = [weight_gradient(*four) for four in zip(parts, pieces, weights, ctx.weights, strict=True)]
        return None, None, dx, *dweights, *(torch.empty_like(bias) for bias in biases)


def grouped_linear(layer: Any, x: torch.Tensor, splits: list[int], *parameters: Any) -> torch.Tensor:
    out: torch.Tensor = _GroupedLinear.apply(layer, splits, x, *parameters)
    return out


def accumulate_wgrad(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """apex's fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32 and _fp16."""
    record("aten::mm", [flat(grad).t(), flat(inputs)], [main_grad])
