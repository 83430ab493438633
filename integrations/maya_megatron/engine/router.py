"""Routers of mixtures of experts as single kernels (--moe-router-fusion). Follows transformer_engine/pytorch/router.py. The chosen experts
depend on values, which are not known, so they are chosen at random."""

from __future__ import annotations

from typing import Any

import torch

from maya_megatron.engine.device import device, launch

_random = torch.Generator().manual_seed(0)  # separate from the program's generator


def _chosen(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """A mask of the experts that each token is routed to."""
    tokens, experts = logits.shape
    mask = torch.empty(tokens, experts, dtype=torch.bool, device=logits.device)
    first = torch.randint(experts, (tokens, 1), generator=_random)
    others = torch.arange(topk) * (experts // topk)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, (first + others) % experts, True)
    device().rules.remember(mask, chosen)
    return mask


class _Scores(torch.autograd.Function):
    """The scores, and a saved copy from before they were reduced to the chosen experts."""

    @staticmethod
    def forward(ctx: Any, name: str, logits: torch.Tensor, topk: int, *others: Any) -> Any:
        scores, mask, before = torch.empty_like(logits), _chosen(logits, topk), torch.empty_like(logits)
        launch(name, [logits, *others], [scores, before])
        ctx.save_for_backward(mask, before)
        ctx.name = name
        ctx.mark_non_differentiable(mask)
        return scores, mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        mask, before = ctx.saved_tensors
        found = torch.empty_like(before)
        launch(f"{ctx.name}_backward", [grad.contiguous(), mask, before], [found])
        return None, found, *[None] * (len(ctx.needs_input_grad) - 2)


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int,
    group_topk: int,
    scaling_factor: float,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> Any:
    flat = logits.view(-1, logits.shape[-1])
    return _Scores.apply("topk_with_scores", flat, topk, *([] if expert_bias is None else [expert_bias]))


def fused_compute_score_for_moe_aux_loss(logits: torch.Tensor, topk: int, score_function: str) -> Any:
    scores, mask = _Scores.apply("scores_for_aux_loss", logits, topk)
    return mask, scores


class _AuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        loss, factor = (torch.empty((), dtype=one, device=probs.device) for one in (probs.dtype, torch.float32))
        launch("moe_aux_loss", [probs, tokens_per_expert], [loss, factor])
        ctx.save_for_backward(factor, tokens_per_expert)
        ctx.like = (probs.shape, probs.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        factor, tokens_per_expert = ctx.saved_tensors
        found = torch.empty(ctx.like[0], dtype=ctx.like[1], device=grad.device)
        launch("moe_aux_loss_backward", [grad, factor, tokens_per_expert], [found])
        return found, None


def fused_moe_aux_loss(probs: torch.Tensor, tokens_per_expert: torch.Tensor, **_: Any) -> torch.Tensor:
    out: torch.Tensor = _AuxLoss.apply(probs, tokens_per_expert)
    return out
