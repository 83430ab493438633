"""Floating-point operations of a call, a multiply-add being two. Attention counts every query against every key."""

from __future__ import annotations

import math
from collections.abc import Callable

from maya_core.device.kernels.call import Call


def _mm(call: Call) -> int:
    first, second = (
        call.inputs[-2:] if call.name in ("addmm", "baddbmm", "addmv", "_addmm_activation") else call.inputs[:2]
    )
    return 2 * first.numel * (second.sizes[-1] if len(second.sizes) > 1 else 1)


def _grouped_mm(call: Call) -> int:
    first, result = call.inputs[0], call.results[0]
    inner = first.sizes[-1]
    if len(first.sizes) == 2 and len(call.inputs[1].sizes) == 2:  # groups along the inner dimension
        return 2 * first.sizes[0] * inner * call.inputs[1].sizes[-1]
    return 2 * result.numel * inner


def _convolution(call: Call) -> int:
    weight, result = call["weight"], call.results[0]
    per_output = math.prod(weight.sizes[2:]) * weight.sizes[1]
    if call["transposed"]:
        return 2 * call["input"].numel * per_output
    return 2 * result.numel * per_output


def _convolution_backward(call: Call) -> int:
    weight, grad, mask = call["weight"], call["grad_output"], call["output_mask"]
    per_output = math.prod(weight.sizes[2:]) * weight.sizes[1]
    each = 2 * (call["input"].numel if call["transposed"] else grad.numel) * per_output
    return each * (bool(mask[0]) + bool(mask[1]))


def _attention(call: Call) -> int:
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, head = query.sizes[-4:]
    keys = key.sizes[-2]
    return 2 * batch * heads * queries * keys * (head + value.sizes[-1])


def _attention_backward(call: Call) -> int:
    # scores again, then gradients of scores, value, query and key
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, queries, head = query.sizes[-4:]
    keys = key.sizes[-2]
    return 2 * batch * heads * queries * keys * (3 * head + 2 * value.sizes[-1])


def _rnn(call: Call) -> int:
    weights = sum(t.numel for t in call["weight"] if len(t.sizes) > 1)
    data = call["input"]
    return 2 * weights * data.numel // max(data.sizes[-1], 1)


FORMULAS: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_addmm_activation", "_scaled_mm"), _mm),
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _grouped_mm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": lambda call: 2 * _rnn(call),
}


def flops(call: Call) -> int:
    formula = FORMULAS.get(call.name)
    return formula(call) if formula else 0
