"""Lists of tensors: foreach ops and fused optimizers. Follows MultiTensorApply.cuh, Foreach*.cu and Fused*.cu of ATen/native/cuda."""

from __future__ import annotations

from maya_core.device.kernels.call import Tensor, tensors_in
from maya_core.predictor.kernels.kernel import Kernel, Op, bytes_moved, chain, helper, memory, moved, pattern

OVERWRITES = ("_foreach_zero_", "_foreach_copy_")  # of which the first list is not read
CHUNK = 65536

# Lists that an optimizer's kernel reads and writes back; the rest of its lists are read.
UPDATED = ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")
READ = ("grads",)


def _total(tensors: list[Tensor]) -> int:
    return sum([moved(tensor) for tensor in tensors])


def foreach(op: Op) -> list[Kernel]:
    """The multi-tensor kernel over all lists, in as few launches as its arguments allow, or a kernel for each tensor."""
    lists = [found for argument in op.arguments if isinstance(argument, list) and (found := list(tensors_in(argument)))]
    numbers = [argument for argument in op.arguments if isinstance(argument, Tensor)]
    first = lists[0]
    in_place = op.name.endswith("_")
    written = first if in_place else op.results
    reads = lists[1:] if op.name in OVERWRITES else lists
    if op.launches == len(first) and len(first) > 1 and op.name != "_foreach_norm":
        return [_one(op, place, reads, written) for place in range(len(first))]
    count = sum([tensor.numel for tensor in first])
    if op.name == "_foreach_norm":
        partials = 4 * (count // CHUNK + len(first))
        middle = max(1, op.launches - 2)
        read = _total(first)
        return [
            helper(partials),
            *[bytes_moved("multi_tensor", read / middle, partials / middle, count / middle)] * middle,
            helper(partials),
        ]
    read = sum([_total(each) for each in reads]) + _total(numbers)
    parts = op.launches
    return [bytes_moved("multi_tensor", read / parts, _total(written) / parts, count / parts)] * parts


def _one(op: Op, place: int, reads: list[list[Tensor]], written: list[Tensor]) -> Kernel:
    target = written[place] if place < len(written) else None
    sources = [each[place] for each in reads if place < len(each)]
    if target is not None and op.name == "_foreach_copy_" and sources and sources[0].device != "cuda":
        return Kernel("copy", "h2d", (target.nbytes,))
    if target is None or not sources:
        return memory("fill", sources, [target])
    return memory(pattern(sources, target), sources, [target])


@chain("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def optimizer(op: Op) -> list[Kernel]:
    updated = sum(_total(list(tensors_in(op.get(name) or []))) for name in UPDATED)
    gradients = sum(_total(list(tensors_in(op.get(name) or []))) for name in READ)
    scaled = gradients if op.get("grad_scale") is not None else 0  # unscaled gradients are written back
    count = sum(tensor.numel for tensor in tensors_in(op.arguments[0]))
    parts = op.launches
    return [
        bytes_moved("multi_tensor", (updated + gradients) / parts, (updated + scaled) / parts, count / parts)
    ] * parts


@chain("_amp_foreach_non_finite_check_and_unscale_")
def unscale(op: Op) -> list[Kernel]:
    gradients = list(tensors_in(op.arguments[0]))
    total, parts = _total(gradients), op.launches
    return [bytes_moved("multi_tensor", total / parts, total / parts, sum(t.numel for t in gradients) / parts)] * parts
