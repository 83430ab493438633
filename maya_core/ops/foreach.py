"""Foreach ops and fused optimizers, which process a list of tensors in as few launches as kernel arguments allow.

Follows MultiTensorApply.cuh, Foreach*.cu and Fused*.cu of ATen/native/cuda. Kernels take 32 KiB of arguments since torch 2.12, and 4 KiB before.
"""

from __future__ import annotations

from typing import NamedTuple

from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import Copy, Kernel, Streaming, small
from maya_core.ops.registry import Assume, aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.traffic import elementwise_pattern, moved, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor, tensors_in

PREFIX = "aten::_foreach_"  # of ops that share one rule
CHUNK = 65536
NORM_CLEANUP_TENSORS = 1920  # tensors per launch of the kernel that combines the partial norms


class ListLimits(NamedTuple):
    """What the arguments of one kernel have room for. The tensors depend on the number of lists."""

    blocks: int
    tensors: tuple[int, ...]
    tensors_with_scalars: tuple[int, ...]  # each tensor has a number of its own


LIMITS = ListLimits(2240, (770, 448, 336, 252, 210), (672, 448, 336, 252, 210))
LIMITS_BEFORE_2_12 = ListLimits(320, (110, 64, 48, 36, 30), (96, 64, 48, 36, 30))
OVERWRITES = aten("_foreach_zero_", "_foreach_copy_")  # they do not read their first list

# Lists that the kernel of an optimizer reads and writes.
UPDATED = ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")


def launches(platform: Platform, tensors: list[Tensor], depth: int, scalar_list: bool = False) -> int:
    """The number of kernels that multi_tensor_apply launches for lists like this one."""
    limits = LIMITS if platform.since(2, 12) else LIMITS_BEFORE_2_12
    limit = (limits.tensors_with_scalars if scalar_list else limits.tensors)[min(depth, 5) - 1]
    count = blocks = held = 0
    for tensor in tensors:
        if tensor.numel == 0:
            continue
        held += 1
        chunks = -(-tensor.numel // CHUNK)
        while chunks:
            taken = min(chunks, limits.blocks - blocks)
            blocks += taken
            chunks -= taken
            if blocks == limits.blocks or (held == limit and chunks == 0):
                count += 1
                blocks = 0
                held = 1 if chunks else 0
    return count + (blocks > 0)


def _lists(call: Call) -> list[list[Tensor]]:
    return [
        found for argument in call.arguments if isinstance(argument, list) and (found := list(tensors_in(argument)))
    ]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether sizes and strides are equal; strides of dimensions of size 1 do not matter (ForeachUtils.h)."""
    return one.sizes == other.sizes and all(
        a == b or size == 1 for size, a, b in zip(one.sizes, one.strides, other.strides, strict=True)
    )


def takes_fast_route(lists: list[list[Tensor]]) -> bool:
    """Whether ATen uses the multi-tensor kernel, which needs equal shapes, layouts, dtypes and devices in all lists."""
    for tensors in zip(*lists, strict=False):
        first = tensors[0]
        if any(not _alike(t, first) or t.dtype != first.dtype or t.device != "cuda" for t in tensors):
            return False
        if not first.is_dense:
            return False
    return all(t.dtype == lists[0][0].dtype for t in lists[0])


def _has_single_factors(call: Call, lists: list[list[Tensor]], platform: Platform) -> bool:
    """Whether the last factors of addcmul or addcdiv have one element each, which are not among the lists of the kernel since torch 2.11
    (ForeachPointwiseOp.cu)."""
    pointwise = call.name.startswith((f"{PREFIX}addcmul", f"{PREFIX}addcdiv"))
    return pointwise and platform.since(2, 11) and call.overload == "Scalar" and all(not t.sizes for t in lists[-1])


def _by_multi_tensor_kernel(call: Call, lists: list[list[Tensor]], platform: Platform) -> bool:
    """Whether ATen batches the call; otherwise it launches one kernel for each tensor."""
    if call.name == "aten::_foreach_zero_":
        return takes_fast_route(lists[:1])
    if call.name == "aten::_foreach_copy_":
        pairs = list(zip(*lists[:2], strict=True))
        one_pair = len({(to.dtype, source.dtype) for to, source in pairs}) == 1
        return one_pair and all(_alike(to, source) and source.device == "cuda" for to, source in pairs)
    if _has_single_factors(call, lists, platform):
        lists = lists[:-1]
    if not takes_fast_route(lists):
        return False
    first = lists[0][0]
    return not (call.overload == "Tensor" and any(t.dtype != first.dtype for t in call.inputs if not t.sizes))


def _depth(call: Call, lists: list[list[Tensor]], platform: Platform) -> int:
    """The number of lists that the kernel processes."""
    if call.name in OVERWRITES:
        return len(lists)
    return len(lists) - _has_single_factors(call, lists, platform) + (0 if call.name.endswith("_") else 1)


def _total(tensors: list[Tensor]) -> int:
    return sum([moved(tensor) for tensor in tensors])


def foreach(call: Call, platform: Platform) -> Work:
    """Any _foreach op: the multi-tensor kernel over all lists, or one kernel for each tensor if the lists do not qualify."""
    lists = _lists(call)
    if not lists:
        return Work()
    first = lists[0]
    written = first if call.name.endswith("_") else call.results
    reads = lists[1:] if call.name in OVERWRITES else lists
    if not _by_multi_tensor_kernel(call, lists, platform):
        return Work().launch(*(_one(call, place, reads, written) for place in range(len(first))))
    if call.name == "aten::_foreach_norm":
        return _norm(first, platform)
    numbers = [argument for argument in call.arguments if isinstance(argument, Tensor)]
    scalar_list = "ScalarList" in call.overload or call.overload == "Tensor"
    read = sum([_total(each) for each in reads]) + _total(numbers)
    return _shared(launches(platform, first, _depth(call, lists, platform), scalar_list), read, _total(written), first)


def _shared(parts: int, read: float, written: float, tensors: list[Tensor]) -> Work:
    """The launches of the multi-tensor kernel, each with its part of the work."""
    if not parts:
        return Work()
    whole = Streaming("multi_tensor", read, written, sum([tensor.numel for tensor in tensors]))
    return Work().launch(*[whole.part(parts)] * parts)


def _one(call: Call, place: int, reads: list[list[Tensor]], written: list[Tensor]) -> Kernel:
    target = written[place] if place < len(written) else None
    sources = [each[place] for each in reads if place < len(each)]
    if target is not None and call.name == "aten::_foreach_copy_" and sources and sources[0].device != "cuda":
        return Copy("h2d", target.nbytes)
    if target is None or not sources:
        return streaming("fill", sources, [target])
    return streaming(elementwise_pattern(sources, target), sources, [target])


def _norm(tensors: list[Tensor], platform: Platform) -> Work:
    """Sums by chunks into partial norms, and combines them. Until torch 2.14 each tensor has as many partial norms as the largest, and they
    are zeroed. Since 2.15 each has its own number, and a copy tells the kernels where those of a tensor begin."""
    item = max(4, tensors[0].itemsize)
    chunks = [-(-tensor.numel // CHUNK) for tensor in tensors]
    partials = item * sum(chunks)
    work = Work()
    if platform.since(2, 15):
        work.temporary(partials)
        begins = 8 * (len(tensors) + 1)
        work.temporary(begins)
        work.launch(Copy("h2d", begins))
    else:
        work.temporary(item * len(tensors) * max(chunks))
        work.launch(small(partials))
    work.launch(*_shared(launches(platform, tensors, 1), _total(tensors), partials, tensors).kernels)
    work.launch(*[small(partials)] * -(-len(tensors) // NORM_CLEANUP_TENSORS))
    return work.out(*range(len(tensors)))


@op(*aten("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"))
def fused_optimizer(call: Call, platform: Platform) -> Work:
    lists = {name: found for name in (*UPDATED, "grads") if (found := list(tensors_in(call.get(name) or [])))}
    parameters = list(tensors_in(call.arguments[0]))
    gradients = _total(lists.get("grads", []))
    updated = sum(_total(tensors) for name, tensors in lists.items() if name != "grads")
    scaled = gradients if call.get("grad_scale") is not None else 0  # unscaled gradients are written back
    return _shared(launches(platform, parameters, len(lists)), updated + gradients, updated + scaled, parameters)


@op("aten::_amp_foreach_non_finite_check_and_unscale_")
def unscale(call: Call, platform: Platform) -> Work:
    gradients = list(tensors_in(call.arguments[0]))
    return _shared(launches(platform, gradients, 1), _total(gradients), _total(gradients), gradients)


values("aten::_amp_foreach_non_finite_check_and_unscale_", assume=Assume.ALL_FINITE)


# ---- results: fused optimizers change their arguments and return nothing ----
@describe(
    "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",
    "aten::_fused_sgd_.tensor_lr",
    "aten::_fused_adagrad_",
    "aten::_fused_adagrad_.tensor_lr",
)
def fused_step(*_: object, **__: object) -> None: ...
