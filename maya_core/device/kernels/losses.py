"""Losses as one op. Follows Loss.cpp, BinaryOps.cpp and cuda/Loss.cu, NLLLoss2d.cu, LossNLL of ATen/native.

A structured loss makes its output at the shape of the input before it reduces into it: the scalar keeps that memory.
"""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Tensor, Work, kernel, packed
from maya_core.device.kernels.iterator import pointwise_launches
from maya_core.device.kernels.reductions import KINDS, add_reduction

NONE, MEAN, SUM = range(3)


def _reduce(work: Work, call: Call, each: Tensor) -> Work:
    return add_reduction(work, each, [], call, KINDS["mean" if call["reduction"] == MEAN else "sum"])


def _each(call: Call) -> Tensor:
    """The loss of each element, before it is reduced."""
    source, result = call.inputs[0], call.results[0]
    return Tensor(result.dtype, source.sizes, packed(source.sizes), "cuda")


@kernel("mse_loss", "smooth_l1_loss")
def structured_loss(call: Call) -> Work:
    if call["reduction"] == NONE:
        return Work()
    each = _each(call)
    work = Work().storage(each.nbytes).out(0)
    values = work.temporary(each.nbytes)
    return _reduce(work, call, each).free(values)


@kernel("huber_loss")
def huber_loss(call: Call) -> Work:
    if call["reduction"] == NONE:
        return Work()
    each = _each(call)
    work = Work()
    values = work.temporary(each.nbytes)
    return _reduce(work.out(0), call, each).free(values)


@kernel("binary_cross_entropy")
def binary_cross_entropy(call: Call) -> Work:
    if call["reduction"] == NONE:
        return Work(launches=1 + (call.get("weight") is not None))
    each = _each(call)
    work = Work(launches=1 + (call.get("weight") is not None)).storage(each.nbytes).out(0)
    total = work.temporary(each.itemsize)
    _reduce(work, call, each)
    work.launches += 1  # copied into the output
    return work.free(total)


@kernel("log_sigmoid_forward")
def log_sigmoid(call: Call) -> Work:
    return Work().out(0).storage(0).out(1)  # the buffer is the CPU's


@kernel("nll_loss_forward")
def nll_loss(call: Call) -> Work:
    unreduced = call["reduction"] == NONE and len(call.inputs[0].sizes) > 1
    return Work(launches=2 if unreduced else 1)  # the total weight is zeroed


@kernel("nll_loss2d_forward")
def nll_loss2d(call: Call) -> Work:
    if call["reduction"] == NONE:
        return Work(launches=2).out(1, 0)
    return Work(launches=4 if call["reduction"] == MEAN else 3)


@kernel("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Work:
    """Zeroed, then written where the targets are."""
    return Work(launches=pointwise_launches(call.results[0], []) + 1)
