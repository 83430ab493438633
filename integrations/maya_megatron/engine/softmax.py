"""Softmax of scores, scaled and masked in one kernel, as in Transformer Engine and in apex's modules."""

from __future__ import annotations

import os
from typing import Any

import torch

from maya_megatron.engine.device import launch


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out = forward(scores, mask)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return backward(grad.contiguous(), out), None


def forward(scores: torch.Tensor, *mask: Any) -> torch.Tensor:
    out = torch.empty_like(scores)
    launch(
        "scaled_masked_softmax",
        [scores, *(one for one in mask if isinstance(one, torch.Tensor) and one.is_cuda)],
        [out],
    )
    return out


def backward(grad: torch.Tensor, out: torch.Tensor, *_: Any) -> torch.Tensor:
    """Overwrites the incoming gradient, as scaled_masked_softmax_backward in softmax.cpp does with `output_grads`."""
    launch("scaled_masked_softmax_backward", [grad, out], [grad])
    return grad


def fits_kernel(scores: torch.Tensor, mask: torch.Tensor | None, kind: str) -> bool:
    """FusedScaleMaskSoftmax.is_kernel_available."""
    batch, heads, queries, keys = scores.shape
    if os.getenv("NVTE_MASKED_SOFTMAX_FUSION", "1") == "0" or scores.dtype not in (torch.float16, torch.bfloat16):
        return False
    if not 16 < keys < 16384 or keys % 8 or queries % 4 or (batch * heads) % 4 or queries == 1:
        return False
    if kind == "causal" and queries != keys:
        return False
    power = 1 << (keys - 1).bit_length()
    warps_of = 32 if power > 32 else power
    at_once = 128 // warps_of * (2 if power <= 128 else 1)
    if queries % at_once:
        return False
    masked = "padding" in kind or kind == "arbitrary"
    return not masked or (mask is not None and mask.shape[0] in (1, batch) and mask.shape[1:] == (1, queries, keys))


def scaled_masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None, kind: str) -> torch.Tensor:
    if fits_kernel(scores, mask, kind):
        out: torch.Tensor = _Softmax.apply(scores, mask if kind != "no_mask" else None)
        return out
    wide = scores.float()
    if mask is not None and kind != "no_mask":
        wide = wide.masked_fill(mask, -10000.0)
    return torch.softmax(wide, -1).to(scores.dtype)
