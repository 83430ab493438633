"""CTC, which has a cuDNN form with conditions of its own, and the backward of losses that have no Meta kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from maya_core.device.rules.book import Rules, describe, rule

# cuDNN's documented limit is 256; see _use_cudnn_ctc_loss in ATen/native/cudnn/LossCTC.cpp
_LONGEST_CUDNN_TARGET = 256


def _cudnn_takes(log_probs: torch.Tensor, targets: torch.Tensor, blank: int) -> bool:
    return (
        torch._C._get_cudnn_enabled()
        and blank == 0
        and targets.dim() == 1
        and targets.dtype == torch.int32
        and targets.is_contiguous()
        and log_probs.dtype == torch.float32
        and log_probs.dim() == 3
    )


def _targets_fit(input_lengths: Sequence[int], target_lengths: Sequence[int]) -> bool:
    return all(
        target < _LONGEST_CUDNN_TARGET and target <= length
        for target, length in zip(target_lengths, input_lengths, strict=False)
    )


@rule("aten::_use_cudnn_ctc_loss")
def use_cudnn_ctc_loss(
    rules: Rules,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: list[int],
    target_lengths: list[int],
    blank: int,
) -> bool:
    full = all(length == log_probs.size(0) for length in input_lengths)
    return (
        _cudnn_takes(log_probs, targets, blank)
        and targets.device.type == "cpu"
        and full
        and _targets_fit(input_lengths, target_lengths)
    )


@rule("aten::_use_cudnn_ctc_loss.Tensor")
def use_cudnn_ctc_loss_tensor(
    rules: Rules,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
) -> bool:
    if not _cudnn_takes(log_probs, targets, blank) or {input_lengths.dtype, target_lengths.dtype} != {torch.int32}:
        return False
    return _targets_fit(input_lengths.tolist(), target_lengths.tolist())  # on a GPU this reads them back too


@rule("aten::_use_miopen_ctc_loss", "aten::_use_miopen_ctc_loss.Tensor")
def use_miopen_ctc_loss(rules: Rules, *_: Any) -> bool:
    return False  # asked for on any GPU; MIOpen is AMD's


@describe("aten::_cudnn_ctc_loss", "aten::_cudnn_ctc_loss.Tensor")
def cudnn_ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return log_probs.new_empty(log_probs.size(1)), log_probs.new_empty(log_probs.shape)


@rule("aten::_ctc_loss.Tensor")
def ctc_loss_tensor(
    rules: Rules,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> Any:
    # as CUDA's: the lengths are read back, and the form with lists of numbers does the work
    return torch.ops.aten._ctc_loss(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, zero_infinity
    )


@describe("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor")
def ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape)


@describe("aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward")
def margin_loss_backward(grad_output: torch.Tensor, self: torch.Tensor, *_: Any) -> torch.Tensor:
    return self.new_empty(self.shape)


@describe("aten::multi_margin_loss_backward.grad_input", "aten::multilabel_margin_loss_backward.grad_input")
def margin_loss_backward_out(
    grad_output: torch.Tensor, self: torch.Tensor, *_: Any, grad_input: torch.Tensor
) -> torch.Tensor:
    return grad_input.resize_(self.shape)
