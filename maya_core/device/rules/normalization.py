"""What SyncBatchNorm is made of on CUDA, and batch norms that write into given tensors."""

from __future__ import annotations

import torch

from maya_core.device.rules.book import describe


def _per_channel(input: torch.Tensor) -> torch.Tensor:
    """Statistics are kept in float for half types, as at::acc_type says."""
    dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    return input.new_empty(input.size(1), dtype=dtype)


@describe("aten::batch_norm_stats")
def batch_norm_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _per_channel(input), _per_channel(input)


@describe("aten::batch_norm_update_stats")
def batch_norm_update_stats(
    input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _per_channel(input), _per_channel(input)


@describe("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts")
def batch_norm_gather_stats(
    input: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _per_channel(input), _per_channel(input)


@describe("aten::batch_norm_elemt")
def batch_norm_elemt(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    return torch.empty_like(input)


@describe("aten::batch_norm_elemt.out")
def batch_norm_elemt_out(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    return out


@describe("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor | None, ...]:
    parameter = mean if weight is None else weight
    return (
        torch.empty_like(mean) if input_g else None,
        torch.empty_like(mean) if input_g else None,
        parameter.new_empty(input.size(1)) if weight_g else None,
        parameter.new_empty(input.size(1)) if bias_g else None,
    )


@describe("aten::batch_norm_backward_elemt")
def batch_norm_backward_elemt(grad_out: torch.Tensor, input: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(input)


@describe("aten::_native_batch_norm_legit.out")
def native_batch_norm_out(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    out: torch.Tensor,
    save_mean: torch.Tensor,
    save_invstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    statistics = input.size(1) if training else 0
    return out.resize_(input.shape), save_mean.resize_(statistics), save_invstd.resize_(statistics)


@describe("aten::_native_batch_norm_legit.no_stats_out")
def native_batch_norm_no_stats_out(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    out: torch.Tensor,
    save_mean: torch.Tensor,
    save_invstd: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    return out.resize_(input.shape), save_mean.resize_(input.size(1)), save_invstd.resize_(input.size(1))
