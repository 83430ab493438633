"""Losses that are one op. Kernels follow Loss.cpp, BinaryOps.cpp and cuda/Loss.cu, NLLLoss2d.cu, LossCTC.cu of ATen/native.

A structured loss allocates its output with the shape of the input before it reduces into it, and the scalar keeps that memory. CTC has a
cuDNN version with its own conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maya_core.hardware.platform import Platform
from maya_core.ops import tensor_iterator
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.kernel import Copy, Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.reductions import MEAN as MEAN_KIND
from maya_core.ops.reductions import SUM as SUM_KIND
from maya_core.ops.reductions import add_reduction
from maya_core.ops.registry import Sample, aten, op, values
from maya_core.ops.rules import Rules, describe, rule
from maya_core.ops.traffic import moved, streaming
from maya_core.ops.work import Work
from maya_core.torch_seam.cuda import cudnn_enabled
from maya_core.trace.call import Call, Tensor, packed

NONE, MEAN, SUM = range(3)


def _reduce(work: Work, call: Call, platform: Platform, each: Tensor) -> Work:
    return add_reduction(work, each, [], platform, MEAN_KIND if call["reduction"] == MEAN else SUM_KIND)


def _each(call: Call) -> Tensor:
    """The kernel for the loss of each element, before the reduction."""
    source, result = call.inputs[0], call.results[0]
    return Tensor(result.dtype, source.sizes, packed(source.sizes), "cuda")


def _of_each(call: Call) -> list[Streaming]:
    source = call.inputs[0]
    kernels = [streaming("elementwise", call.inputs[:2], [source])]
    if call.get("weight") is not None:
        kernels.append(streaming("elementwise", [source, call.tensor("weight")], [source]))
    return kernels


@op(*aten("mse_loss", "smooth_l1_loss", "huber_loss"))
def loss(call: Call, platform: Platform) -> Work:
    work = Work().launch(*_of_each(call))
    if call["reduction"] == NONE:
        return work
    each = _each(call)
    if call.name == "aten::huber_loss":
        of_each = work.temporary(each.nbytes)
        work.out(0)
    else:
        of_each = work.storage(each.nbytes).out(0).temporary(each.nbytes)
    return _reduce(work, call, platform, each).free(of_each)


@op("aten::binary_cross_entropy")
def binary_cross_entropy(call: Call, platform: Platform) -> Work:
    """Multiplies by the weights, and copies the total to the output."""
    work = Work().launch(*_of_each(call))
    if call["reduction"] == NONE:
        return work
    each = _each(call)
    total = work.storage(each.nbytes).out(0).temporary(each.itemsize)
    return _reduce(work, call, platform, each).launch(Copy("d2d", each.itemsize)).free(total)


@op("aten::mse_loss_backward")
def mse_loss_backward(call: Call, platform: Platform) -> Work:
    """Zeroes the gradient first."""
    reads = [call.tensor(name) for name in ("grad_output", "self", "target")]
    given = [tensor for tensor in reads if tensor is not None]
    return Work().launch(streaming("fill", [], call.results), *one_kernel(None, given, call.results))


@op("aten::binary_cross_entropy_backward")
def binary_cross_entropy_backward(call: Call, platform: Platform) -> Work:
    """Allocates the result like the gradient first."""
    result = call.results[0]
    given = [tensor for name in ("self", "target") if (tensor := call.tensor(name)) is not None]
    return Work().launch(
        *one_kernel(None, [call["grad_output"]], [result]), *one_kernel(None, [result, *given], [result])
    )


@op(*aten("smooth_l1_loss_backward", "huber_loss_backward", "multi_margin_loss", "multi_margin_loss_backward",
          "multilabel_margin_loss_forward", "multilabel_margin_loss_backward"))  # fmt: skip
def elementwise_loss(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


@op("aten::log_sigmoid_forward")
def log_sigmoid(call: Call, platform: Platform) -> Work:
    return (
        Work().out(0).storage(0).out(1).launch(*one_kernel(None, call.inputs, call.results))
    )  # the buffer is the CPU's


# ---- negative log likelihood ----
@op("aten::nll_loss_forward")
def nll_loss(call: Call, platform: Platform) -> Work:
    """One block for all targets, or one thread for each after the total weight is zeroed (cuda/Loss.cu)."""
    scores, targets = call["self"], call["target"]
    read, written = moved(targets) + 32 * targets.numel, sum(map(moved, call.results))
    if call["reduction"] == NONE and len(scores.sizes) > 1:
        return Work().launch(small(), Streaming("gather", read, written, targets.numel))
    return Work().launch(Streaming("loss", read, written, targets.numel) if len(scores.sizes) > 1 else small())


@op("aten::nll_loss_backward")
def nll_loss_backward(call: Call, platform: Platform) -> Work:
    """Zeroes the whole gradient, in parts past 2 GiB, then writes at the targets."""
    targets, result = call["target"], call.results[0]
    parts = tensor_iterator.parts(result, [])
    zeroed = Streaming("fill", 0, result.nbytes, result.numel).part(parts)
    return Work().launch(*[zeroed] * parts, Streaming("loss", moved(targets), 32 * targets.numel, targets.numel))


@op("aten::nll_loss2d_forward")
def nll_loss2d(call: Call, platform: Platform) -> Work:
    targets, result = call["target"], call.results[0]
    picked = Streaming("gather", moved(targets) + 32 * targets.numel, moved(result), targets.numel)
    if call["reduction"] == NONE:
        return Work().out(1, 0).launch(small(), picked)
    work = Work().launch(small(), small(), picked)
    return work.launch(small()) if call["reduction"] == MEAN else work


@op("aten::nll_loss2d_backward")
def nll_loss2d_backward(call: Call, platform: Platform) -> Work:
    target, result = call["target"], call.results[0]
    parts = tensor_iterator.parts(result, [])
    zeroed = streaming("fill", [], [result]).part(parts)
    return Work().launch(*[zeroed] * parts, streaming("scatter", [target], [target]))


# ---- CTC ----
@op("aten::_ctc_loss")
def ctc_loss(call: Call, platform: Platform) -> Work:
    alpha = call.tensor("1")
    return Work().launch(streaming("fill", [], [alpha]), streaming("other", [call.tensor("log_probs"), alpha], [alpha]))


@op("aten::_ctc_loss_backward")
def ctc_loss_backward(call: Call, platform: Platform) -> Work:
    probabilities, alpha = call.tensor("log_probs"), call.tensor("log_alpha")
    return Work().launch(
        streaming("fill", [], call.results),
        streaming("other", [probabilities, alpha], call.results),
        streaming("other", [probabilities], call.results),
    )


@op(*aten("_cudnn_ctc_loss"))
def cudnn_ctc_loss(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results))


values(*aten("_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss"), mixes_devices=True)


# ---- results ----
# cuDNN's documented limit is 256; see _use_cudnn_ctc_loss in ATen/native/cudnn/LossCTC.cpp
_LONGEST_CUDNN_TARGET = 256


def _cudnn_takes(log_probs: torch.Tensor, targets: torch.Tensor, blank: int) -> bool:
    return (
        cudnn_enabled()
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
    return _targets_fit(input_lengths.tolist(), target_lengths.tolist())  # on a GPU this copies them to the host, too


@rule("aten::_use_miopen_ctc_loss", "aten::_use_miopen_ctc_loss.Tensor")
def use_miopen_ctc_loss(rules: Rules, *_: Any) -> bool:
    return False  # called on any GPU; MIOpen is AMD's


@describe("aten::_cudnn_ctc_loss", "aten::_cudnn_ctc_loss.Tensor")
def cudnn_ctc_loss_meta(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
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
    # As on CUDA, the lengths are copied to the host, and the version with lists of numbers does the work.
    return torch.ops.aten._ctc_loss(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, zero_infinity
    )


@describe("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor")
def ctc_loss_backward_meta(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape)


@describe("aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward")
def margin_loss_backward(grad_output: torch.Tensor, self: torch.Tensor, *_: Any) -> torch.Tensor:
    return self.new_empty(self.shape)


@describe("aten::multi_margin_loss_backward.grad_input", "aten::multilabel_margin_loss_backward.grad_input")
def margin_loss_backward_out(
    grad_output: torch.Tensor, self: torch.Tensor, *_: Any, grad_input: torch.Tensor
) -> torch.Tensor:
    return grad_input.resize_(self.shape)


values(
    *aten("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss_forward", "nll_loss2d_forward", "_ctc_loss",
          "multi_margin_loss", "multilabel_margin_loss_forward"),
    sample=Sample.POSITIVE,
)  # fmt: skip
