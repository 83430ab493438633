"""Elementwise ops, copies, and what is made of nothing. Follows Loops.cuh, Copy.cu, FillKernel.cu, Distributions.cu, Dropout.cu of ATen/native/cuda."""

from __future__ import annotations

from maya_core.device.kernels.call import HALVES, Tensor
from maya_core.predictor.kernels.kernel import Kernel, Op, bytes_moved, chain, helper, layout, memory, pattern

# op: the pattern of its one kernel, if not that of its operands' layout
PATTERNS = {
    "native_dropout": "dropout",
    "_fused_dropout": "dropout",
    "glu_backward": "elementwise",  # ActivationGluKernel.cu: a kernel of its own over both halves
    **dict.fromkeys(
        ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
        "random",
    ),
    **dict.fromkeys(("fill_", "zero_", "arange", "range", "linspace", "logspace", "full"), "fill"),
}

# Ops whose first argument is written but not read.
OVERWRITES = {
    "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
    "geometric_",
}  # fmt: skip

# Inputs that an op asks only the shape of.
ONLY_SHAPES = {
    "avg_pool3d_backward": {"self"},
    "huber_loss_backward": set(),
}

# Bound by arithmetic or by latency, not by bytes: what is known of them is a lower bound. Solvers, transforms.
NOT_BY_BYTES = ("linalg_", "_linalg_", "_fft_", "cholesky", "_cholesky", "ormqr", "geqrf", "lu_", "triangular_solve",
                "_cdist", "_pdist", "mode", "kthvalue", "median", "nanmedian", "renorm")  # fmt: skip


def elementwise(op: Op) -> list[Kernel]:
    """One kernel over every element of the result, or as many as 32-bit indices need."""
    inputs = op.inputs
    results = op.results or inputs[:1]
    if not results:
        return [helper()]
    if op.name in OVERWRITES:
        inputs = inputs[1:]
    ignored = ONLY_SHAPES.get(op.name)
    if ignored:
        inputs = [tensor for name, tensor in op.named.items() if isinstance(tensor, Tensor) and name not in ignored]
    model = PATTERNS.get(op.name)
    if model is None:
        model = "other" if op.name.startswith(NOT_BY_BYTES) else pattern(inputs, results[0])
    return [memory(model, inputs, results)]


for _name in PATTERNS:
    chain(_name)(elementwise)


@chain("copy_", "_copy_from", "_to_copy", "clone")
def copy(op: Op) -> list[Kernel]:
    """A memcpy if both lie in memory the same way, else a kernel (Copy.cu, copy_requires_temporaries and copy_device_to_device)."""
    to, source = op.inputs[:2]
    if to.device != source.device:
        return [Kernel("copy", "h2d" if to.device == "cuda" else "d2h", (to.nbytes,))]
    if to.dtype == source.dtype and to.sizes == source.sizes and to.strides == source.strides and to.is_dense:
        return [Kernel("copy", "d2d", (to.nbytes,))]
    model = layout([source], to)
    if model == "elementwise" and to.dtype != source.dtype and (to.dtype not in HALVES or source.dtype != "Float"):
        model = "cast"  # but from float to halves: kernels of their own, vectorized
    return [memory(model, [source], [to])]


@chain("_local_scalar_dense")
def item(op: Op) -> list[Kernel]:
    return [Kernel("copy", "d2h", (op.inputs[0].itemsize,))]


@chain("pow")
def power(op: Op) -> list[Kernel]:
    if op.overload == "Scalar":  # the base is made a tensor first
        return [helper(), memory("strided", op.inputs, op.results)]
    return elementwise(op)


@chain("eye")
def eye(op: Op) -> list[Kernel]:
    diagonal = min(op.results[0].sizes)
    return [memory("fill", [], op.results), bytes_moved("scatter", 0, 32 * diagonal, diagonal)]


@chain("equal")
def equal(op: Op) -> list[Kernel]:
    first, second = op.inputs[:2]
    count = first.numel
    return [
        bytes_moved("elementwise", first.nbytes + second.nbytes, count, count),
        bytes_moved("reduction", count, 1, count, count),
        Kernel("copy", "d2h", (1,)),
    ]
