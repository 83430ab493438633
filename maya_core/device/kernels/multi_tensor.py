"""Multi-tensor kernels: foreach and fused optimizers batch a list of tensors into as few launches as arguments allow.

Follows ATen/native/cuda/MultiTensorApply.cuh and Foreach*.cu (CUDA 13: 32 KiB of kernel arguments).
"""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Tensor, Work, kernel, tensors_in

CHUNK = 65536
MAX_BLOCKS = 2240
MAX_TENSORS = [770, 448, 336, 252, 210]
MAX_TENSORS_SCALAR_LIST = [672, 448, 336, 252, 210]
NORM_CLEANUP_TENSORS = 1920  # tensors per launch of the kernel that gathers the partial norms


def launches(tensors: list[Tensor], depth: int, scalar_list: bool = False) -> int:
    """Kernels that multi_tensor_apply launches for lists like this one."""
    limit = (MAX_TENSORS_SCALAR_LIST if scalar_list else MAX_TENSORS)[min(depth, 5) - 1]
    count = blocks = held = 0
    for tensor in tensors:
        if tensor.numel == 0:
            continue
        held += 1
        chunks = -(-tensor.numel // CHUNK)
        while chunks:
            taken = min(chunks, MAX_BLOCKS - blocks)
            blocks += taken
            chunks -= taken
            if blocks == MAX_BLOCKS or (held == limit and chunks == 0):
                count += 1
                blocks = 0
                held = 1 if chunks else 0
    return count + (blocks > 0)


def _lists(call: Call) -> list[list[Tensor]]:
    return [
        list(tensors_in(argument))
        for argument in call.arguments
        if isinstance(argument, list) and any(tensors_in(argument))
    ]


def _alike(one: Tensor, other: Tensor) -> bool:
    """The same sizes and strides; steps along a dimension of one element do not matter (ForeachUtils.h)."""
    return one.sizes == other.sizes and all(
        a == b or size == 1 for size, a, b in zip(one.sizes, one.strides, other.strides, strict=True)
    )


def takes_fast_route(lists: list[list[Tensor]]) -> bool:
    """Whether ATen runs the multi-tensor kernel at all: lists alike in shape, layout, dtype and device."""
    for tensors in zip(*lists, strict=False):
        first = tensors[0]
        if any(not _alike(t, first) or t.dtype != first.dtype or t.device != "cuda" for t in tensors):
            return False
        if not first.is_dense:
            return False
    return all(t.dtype == lists[0][0].dtype for t in lists[0])


def foreach(call: Call) -> Work:
    """Any _foreach op: the multi-tensor kernel, or one kernel per tensor where the lists do not qualify."""
    lists = _lists(call)
    if not lists:
        return Work(launches=0)
    name, tensors = call.name, lists[0]
    if name == "_foreach_zero_":
        return Work(launches=launches(tensors, 1) if takes_fast_route(lists[:1]) else len(tensors))
    if name == "_foreach_copy_":
        alike = all(_alike(a, b) and b.device == "cuda" for a, b in zip(*lists[:2], strict=True))
        one_pair = len({(a.dtype, b.dtype) for a, b in zip(*lists[:2], strict=True)}) == 1
        return Work(launches=launches(tensors, 2) if alike and one_pair else len(tensors))
    if (
        name.startswith(("_foreach_addcmul", "_foreach_addcdiv"))
        and call.op.endswith(".Scalar")
        and all(not t.sizes for t in lists[-1])
    ):
        lists = lists[:-1]  # factors of one number each are read beside the lists (ForeachPointwiseOp.cu)
    if not takes_fast_route(lists):
        return Work(launches=len(tensors))
    if call.op.endswith(".Tensor") and any(t.dtype != tensors[0].dtype for t in call.inputs if not t.sizes):
        return Work(launches=len(tensors))
    if name == "_foreach_norm":
        return _norm(tensors)
    depth = len(lists) + (0 if name.endswith("_") else 1)
    return Work(launches=launches(tensors, depth, scalar_list="ScalarList" in call.op or call.op.endswith(".Tensor")))


def _norm(tensors: list[Tensor]) -> Work:
    partials = len(tensors) * max(-(-t.numel // CHUNK) for t in tensors) * max(4, tensors[0].itemsize)
    work = Work(launches=1 + launches(tensors, 1) + -(-len(tensors) // NORM_CLEANUP_TENSORS))
    work.temporary(partials)
    return work.out(*range(len(tensors)))


@kernel("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def fused_optimizer(call: Call) -> Work:
    parameters = list(tensors_in(call.arguments[0]))
    lists = [
        name
        for name in (
            "self",
            "grads",
            "exp_avgs",
            "exp_avg_sqs",
            "max_exp_avg_sqs",
            "momentum_buffer_list",
            "state_sums",
        )
        if any(tensors_in(call.get(name) or []))
    ]
    return Work(launches=launches(parameters, len(lists)))


@kernel("_amp_foreach_non_finite_check_and_unscale_")
def unscale(call: Call) -> Work:
    return Work(launches=launches(list(tensors_in(call.arguments[0])), 1))
