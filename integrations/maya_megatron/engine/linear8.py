"""Linear, LayerNormLinear and GroupedLinear in FP8: the same modules as in linear.py, inside `fp8_autocast`. The order of quantizing,
gathering and freeing follows transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear}.py.

Weights and their transposes are quantized in the first microbatch of a step and kept. Inputs are saved for backward in FP8, already
transposed unless they have to be gathered first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from maya_megatron.engine import blocks, norms
from maya_megatron.engine.device import device
from maya_megatron.engine.linear import LinearSettings, flat, in_place_of_gradient, scattered, summed
from maya_megatron.engine.precision import Recipe, autocast, first_layer, update_scales
from maya_megatron.engine.quantized import Quantized, Quantizer, Quantizers, multiply, quantizers
from maya_megatron.engine.weights8 import QuantizedTensor


def quantizers_of(layer: Any, recipe: Recipe) -> Quantizers:
    """Created when a layer first runs with a recipe."""
    found: Quantizers | None = getattr(layer, "_quantizers", None)
    if found is None or found.recipe.kind != recipe.kind:
        layer._quantizers = found = _quantizers(layer, recipe)
    return found


def _quantizers(layer: Any, recipe: Recipe) -> Quantizers:
    products = getattr(layer, "num_gemms", 1)
    if not recipe.float8_per_tensor_scaling():
        return blocks.quantizers(recipe, products)
    # A tensor that is split over ranks has the same scale on all of them. Delayed scales are the same anyway.
    split = recipe.float8_current_scaling() and getattr(layer, "sequence_parallel", False)
    mode, group = (getattr(layer, name, None) for name in ("parallel_mode", "tp_group"))
    return quantizers(
        recipe, products, group if split and mode == "column" else None, group if split and mode == "row" else None
    )


def weight_of(layer: Any, name: str, weight: Any, quantizer: Quantizer, first: bool | None, columns: bool) -> Quantized:
    """get_weight_workspace: kept from microbatch to microbatch, if Megatron marks the first one."""
    if isinstance(weight, QuantizedTensor):
        if columns:
            weight.refresh_columns()
        return weight.eight
    kept: dict[str, Quantized] = layer.__dict__.setdefault("_weights_in_eight_bits", {})
    found = kept.get(name)
    if found is not None and columns and found.twice and found.columns is None:
        found = None
        del kept[name]
    if found is None:
        found = quantizer(weight, columns)
        if first is not None:
            kept[name] = found
            device().are_parameters(found.rows, found.columns)
    elif first is None or first:
        quantizer.fill(found, weight)
    return found


def _weights_need_columns(x: torch.Tensor, with_backward: bool) -> bool:
    return (with_backward and x.requires_grad) or autocast().recomputes


NOTHING = (None,) * 4  # for a tensor that is not saved


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Any, first: Any, with_backward: bool, x: Any, weight: Any, bias: Any, norm: Any, norm_bias: Any
    ) -> Any:
        how: LinearSettings = layer.settings()
        made = quantizers_of(layer, autocast().recipe)
        for_weight = with_backward and weight.requires_grad
        whole_later = how.gathers_input and not made.inputs[0].columns_gather
        columns = for_weight and not whole_later and not layer.save_original_input
        statistics: Any = ()
        rows = flat(x)
        if how.norm:
            inputs, statistics = made.inputs[0].normalized(how.norm, rows, columns, norm, norm_bias, how.eps)
        else:
            inputs = made.inputs[0](rows, columns)
        whole = made.inputs[0].gathered(inputs, how.group, columns=False) if how.gathers_input else inputs
        weight8 = weight_of(layer, "weight", weight, made.weights[0], first, _weights_need_columns(x, with_backward))
        tokens = x.shape[0] * (how.tp_size if how.gathers_input else 1)
        out = torch.empty(tokens, *x.shape[1:-1], weight.shape[0], dtype=x.dtype, device=x.device)
        multiply(whole.by_rows(), weight8.by_rows(), flat(out))
        del whole
        out = summed(out, how)
        original = x if for_weight and layer.save_original_input else None
        if columns:
            inputs.only_columns()
        kept = inputs.parts() if for_weight and original is None else NOTHING
        ctx.twice = inputs.twice
        ctx.save_for_backward(*kept, original, weight, bias, *((x, norm, norm_bias, *statistics) if how.norm else ()))
        ctx.weight8 = weight8
        ctx.how, ctx.quantizers, ctx.shape, ctx.dtype = how, made, x.shape, x.dtype
        ctx.weight = weight if how.fuse_wgrad else None
        ctx.updates_scales = made.recipe.delayed() and with_backward and first_layer()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        how: LinearSettings = ctx.how
        saved = ctx.saved_tensors
        original, weight, bias, *normed = saved[len(NOTHING) :]
        inputs = Quantized(*saved[: len(NOTHING)])
        inputs.twice = ctx.twice
        weight8 = ctx.weight8
        of_input, of_grad = ctx.quantizers.inputs[0], ctx.quantizers.grads[0]
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[3:6]
        wants_input = wants_input or how.norm is not None
        rows = flat(grad.contiguous())
        dbias = None
        if how.mode == "row" and how.sequence_parallel and how.tp_size > 1:
            dbias = rows.sum(0) if wants_bias and bias is not None else None
            grads = of_grad.gathered(of_grad(rows, columns=of_grad.columns_gather), how.group, columns=True)
        else:
            dbias = (
                torch.empty_like(bias) if wants_bias and bias is not None else None
            )  # computed by the quantizing kernel
            grads = of_grad(rows, columns=wants_weight or bias is not None)
        if original is not None:
            inputs = of_input(flat(original), columns=not how.gathers_input or of_input.columns_gather)
        arriving = None
        if how.gathers_input and wants_weight:
            inputs, arriving = of_input.gathering(inputs, how.group)

        dx: Any = None
        leaving = None
        if wants_input:
            weight8.need_columns()
            tokens = grads.by_rows().shape[0]
            dx = torch.empty(tokens, weight.shape[1], dtype=ctx.dtype, device=grad.device)
            multiply(grads.by_rows(), weight8.by_columns(), dx)
            if how.mode == "column" and how.tp_size > 1:
                if how.sequence_parallel:
                    dx, leaving = scattered(dx, how.group, wait=False)
                else:
                    leaving = dist.all_reduce(dx, group=how.group, async_op=True)
        dweight = None
        if wants_weight:
            if arriving is not None:
                arriving.wait()
            inputs.need_columns()
            dweight = weight_gradient(grads, inputs, weight, ctx.weight, ctx.dtype)
            inputs.clear()
        del inputs, grads
        if leaving is not None:
            leaving.wait()
        dnorm = dnorm_bias = None
        if how.norm:
            x, norm, norm_bias, *statistics = normed
            of_norm = norms.backward(how.norm, dx.reshape(ctx.shape), x, norm, norm_bias, statistics_of(x, statistics))
            dx, dnorm, dnorm_bias = of_norm
        if ctx.updates_scales:
            update_scales(forward=False)
        dx = None if dx is None else dx.reshape(ctx.shape)
        return None, None, None, dx, dweight, dbias, dnorm, dnorm_bias


def statistics_of(x: torch.Tensor, statistics: list[torch.Tensor]) -> list[torch.Tensor]:
    """Reshapes statistics of token rows, because ATen's backward expects the shape of its input."""
    return [one.reshape(*x.shape[:-1], 1) for one in statistics]


def weight_gradient(grads: Quantized, inputs: Quantized, weight: Any, fused: Any, dtype: torch.dtype) -> Any:
    if fused is None:
        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        return multiply(grads.by_columns(), inputs.by_columns(), out)
    multiply(grads.by_columns(), inputs.by_columns(), fused.main_grad)
    return in_place_of_gradient(fused)


def linear(layer: Any, x: torch.Tensor, bias: Any, first: bool | None) -> torch.Tensor:
    out: torch.Tensor = _Linear.apply(
        layer, first, torch.is_grad_enabled(), x, layer.weight, bias, *layer.norm_parameters()
    )
    return out


class _GroupedLinear(torch.autograd.Function):
    """The tokens and the weight of each expert have their own scales."""

    @staticmethod
    def forward(
        ctx: Any, layer: Any, splits: list[int], first: Any, with_backward: bool, x: Any, *parameters: Any
    ) -> Any:
        count = layer.num_gemms
        weights, biases = parameters[:count], parameters[count:]
        made = quantizers_of(layer, autocast().recipe)
        for_weight = with_backward and weights[0].requires_grad
        columns = for_weight and not layer.save_original_input
        inputs = [of(part, columns) for of, part in zip(made.inputs, flat(x).split(splits), strict=True)]
        need = _weights_need_columns(x, with_backward)
        weights8 = [
            weight_of(layer, f"weight{index}", weight, made.weights[index], first, need)
            for index, weight in enumerate(weights)
        ]
        device().workspaces_of_streams()
        out = torch.empty(*x.shape[:-1], weights[0].shape[0], dtype=x.dtype, device=x.device)
        for part, weight8, into in zip(inputs, weights8, flat(out).split(splits), strict=True):
            if len(into):
                multiply(part.by_rows(), weight8.by_rows(), into)
        original = x if for_weight and layer.save_original_input else None
        if columns:
            for part in inputs:
                part.only_columns()
        kept = [one for part in inputs for one in part.parts()] if columns else []
        ctx.save_for_backward(original, *weights, *biases, *kept)
        ctx.weights8, ctx.biases, ctx.twice = weights8, len(biases), inputs[0].twice
        ctx.splits, ctx.count, ctx.quantizers, ctx.dtype = splits, count, made, x.dtype
        ctx.weights = weights if layer.fuse_wgrad_accumulation else [None] * count
        ctx.updates_scales = made.recipe.delayed() and with_backward and first_layer()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        original, *saved = ctx.saved_tensors
        weights, biases = saved[: ctx.count], saved[ctx.count : ctx.count + ctx.biases]
        kept, weights8 = iter(saved[ctx.count + ctx.biases :]), ctx.weights8
        inputs = [Quantized(*four, twice=ctx.twice) for four in zip(kept, kept, kept, kept, strict=True)]
        wants_input, wants_weight = ctx.needs_input_grad[4:6]
        rows = flat(grad.contiguous())
        dbiases = [torch.empty_like(bias) for bias in biases]  # computed by the quantizing kernels
        grads = [of(part, True) for of, part in zip(ctx.quantizers.grads, rows.split(ctx.splits), strict=True)]
        dx = None
        if wants_input:
            dx = torch.empty(*grad.shape[:-1], weights[0].shape[1], dtype=ctx.dtype, device=grad.device)
            for part, weight8, into in zip(grads, weights8, flat(dx).split(ctx.splits), strict=True):
                weight8.need_columns()
                if len(into):
                    multiply(part.by_rows(), weight8.by_columns(), into)
        dweights = [None] * ctx.count
        if wants_weight:
            if original is not None:
                parts = flat(original).split(ctx.splits)
                inputs = [of(part, True) for of, part in zip(ctx.quantizers.inputs, parts, strict=True)]
            dweights = [
                weight_gradient(*four, ctx.dtype) for four in zip(grads, inputs, weights, ctx.weights, strict=True)
            ]
            for part in inputs:
                part.clear()
        if ctx.updates_scales:
            update_scales(forward=False)
        return None, None, None, None, dx, *dweights, *dbiases


def grouped_linear(
    layer: Any, x: torch.Tensor, splits: list[int], first: bool | None, *parameters: Any
) -> torch.Tensor:
    out: torch.Tensor = _GroupedLinear.apply(layer, splits, first, torch.is_grad_enabled(), x, *parameters)
    return out
