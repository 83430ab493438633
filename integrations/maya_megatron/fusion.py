"""Emulates functions that Megatron decorates with `jit_fuser`, which is torch.compile: chains of elementwise ops that run as one
kernel, without memory for intermediate results. Each call becomes one kernel over its inputs and outputs, forward and backward.

A compiled function is assumed to save its inputs for backward and to recompute the rest (torch.compile's partitioner prefers
existing tensors); of a dropout it saves the mask.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from maya_core.integration import Integration
from maya_core.torch_seam.compile import original_function
from maya_core.torch_seam.tensors import address, pytree

PLAIN = (torch.Tensor, int, float, bool, str, torch.dtype, type(None))
NAMESPACE = "megatron"
Made = tuple[torch.Size, tuple[int, ...], torch.dtype]  # a tensor's sizes, strides and dtype
# Functions that write to their first argument. Compiled, they write to a new tensor first and to the argument last, so this many copies
# exist at once (as inductor compiles them in torch 2.13).
COPIES = {"calculate_predicted_logits": 1}


def install(integration: Integration) -> None:
    patches = integration.patches
    patches.when_imported(
        "megatron.core.jit", lambda module: patches.set(module, "jit_fuser", functools.partial(fused, integration))
    )
    # If Megatron was imported before the emulation started, its functions are already compiled.
    for name in [name for name in sys.modules if name.startswith("megatron.core.")]:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if function := original_function(value):
                patches.set(sys.modules[name], attribute, fused(integration, function))


def fused(integration: Integration, function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function as one kernel if its tensors are on the emulated device. With host tensors, and therefore after the emulation, it
    calls the function itself, so it can stay in Megatron's modules."""
    rules = integration.rules
    shapes: dict[Any, Any] = {}
    name = getattr(function, "__name__", "fused")

    def record(op: str, inputs: Any, outputs: Any) -> None:
        with torch.enable_grad():  # see engine/device.py
            rules.record(op, inputs, outputs)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        plain = not kwargs and all(isinstance(one, PLAIN) for one in args)  # the usual case
        flat, form = (args, None) if plain else pytree.tree_flatten((args, kwargs))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        if not any(one.is_cuda for one in tensors) or not (plain or all(isinstance(one, PLAIN) for one in flat)):
            return function(*args, **kwargs)  # also methods, which may use tensors that are not arguments
        if name == "bias_dropout_add_fused_train":
            (x, bias), residual, probability = args
            return _DropoutAdd.apply(record, probability, x, bias, residual)
        key = (form, *(_kind(one) for one in flat))
        if key not in shapes:
            shapes[key] = _described(function, flat, form)
        if shapes[key] is None:
            copies = [torch.empty_like(tensors[0]) for _ in range(COPIES.get(name, 0))]
            out = function(*args, **kwargs)
            del copies
            return out
        made, out_form = shapes[key]
        outputs = _Fused.apply(record, name, made, *tensors)
        return outputs[0] if out_form.is_leaf() else pytree.tree_unflatten(list(outputs), out_form)

    return call


def _kind(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _described(function: Callable[..., Any], flat: Sequence[Any], form: Any) -> tuple[list[Made], Any] | None:
    """The outputs; None if they depend on more than shapes. `form` is None if `flat` are the arguments themselves."""
    meta = [
        torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        if isinstance(one, torch.Tensor)
        else one
        for one in flat
    ]
    args, kwargs = (meta, {}) if form is None else pytree.tree_unflatten(meta, form)
    try:
        with torch.no_grad():
            out, out_form = pytree.tree_flatten(function(*args, **kwargs))
    except (RuntimeError, NotImplementedError):
        return None
    seen = {address(one.untyped_storage()) for one in meta if isinstance(one, torch.Tensor)}
    if not all(isinstance(one, torch.Tensor) and address(one.untyped_storage()) not in seen for one in out):
        return None  # in place, or a view of an input
    return [(one.shape, torch.empty_like(one).stride(), one.dtype) for one in out], out_form


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: Any, name: str, made: list[Made], *inputs: torch.Tensor) -> Any:
        device = inputs[0].device
        outputs = tuple(
            torch.empty_strided(sizes, strides, dtype=dtype, device=device) for sizes, strides, dtype in made
        )
        record(f"{NAMESPACE}::{name}", inputs, outputs)
        ctx.save_for_backward(*inputs)
        ctx.record, ctx.name = record, name
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs = ctx.saved_tensors
        largest = max(one.numel() for one in inputs)
        wanted = [i for i, one in enumerate(inputs) if ctx.needs_input_grad[i + 3]]
        # The gradient of a broadcast input is a sum.
        whole = {i: torch.empty_like(inputs[i]) for i in wanted if inputs[i].numel() == largest}
        parts = [i for i in wanted if i not in whole]
        if whole:
            ctx.record(f"{NAMESPACE}::{ctx.name}_backward", [*grads, *inputs], list(whole.values()))
        found = dict(whole)
        for i in parts:
            found[i] = torch.empty_like(inputs[i])
            ctx.record(f"{NAMESPACE}::{ctx.name}_sum", [*(list(whole.values())[:1] or grads)], [found[i]])
        return None, None, None, *(found.get(i) for i in range(len(inputs)))


class _DropoutAdd(torch.autograd.Function):
    """residual + dropout(x + bias). The gradient of the residual is the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, record: Any, probability: float, x: Any, bias: Any, residual: Any) -> torch.Tensor:
        out = torch.empty_like(x)
        mask = torch.empty_like(x, dtype=torch.bool) if probability else None
        inputs = [one for one in (x, bias, residual) if one is not None]
        record(f"{NAMESPACE}::bias_dropout_add", inputs, [out] if mask is None else [out, mask])
        ctx.save_for_backward(*([] if mask is None else [mask]))
        ctx.record, ctx.dtype = record, residual.dtype
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x = grad
        if ctx.saved_tensors:
            grad_x = torch.empty_like(grad)
            ctx.record(f"{NAMESPACE}::bias_dropout_add_backward", [grad, *ctx.saved_tensors], [grad_x])
        grad_bias = None
        if ctx.bias is not None and ctx.needs_input_grad[3]:
            shape, dtype = ctx.bias
            grad_bias = grad_x.sum_to_size(shape).to(dtype)
        return None, None, grad_x, grad_bias, grad.to(ctx.dtype)
