"""What each op does on a GPU, one family of ops a file: what comes out where torch's Meta kernel cannot say, what becomes of known values,
which kernels it launches, its temporaries in order, its floating-point operations.

Figures are those of torch 2.13's CUDA kernels; each file names the ATen sources it follows. An op of your own is described the same
way, in your program: docs/extending.md has an example.
"""

from maya_core.hardware.platform import Platform
from maya_core.ops import (
    attention,
    convolution,
    elementwise,
    foreach,
    images,
    indexing,
    linalg,
    losses,
    normalization,
    packages,
    products,
    quantization,
    random,
    recurrent,
    reductions,
    selection,
    shards,
    sorting,
    sparse,
)
from maya_core.ops.kernel import Attention, Convolution, Copy, Gemm, Kernel, Streaming, Timed
from maya_core.ops.plan import flops_of, kernels_of, plan
from maya_core.ops.registry import op
from maya_core.ops.rules import Rules, rule
from maya_core.ops.traffic import streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor

FAMILIES = (
    attention, convolution, elementwise, foreach, images, indexing, linalg, losses, normalization, packages, products, quantization,
    random, recurrent, reductions, selection, shards, sorting, sparse,
)  # fmt: skip

__all__ = [
    "FAMILIES", "Attention", "Call", "Convolution", "Copy", "Gemm", "Kernel", "Platform", "Rules", "Streaming", "Tensor", "Timed", "Work",
    "flops_of", "kernels_of", "op", "plan", "rule", "streaming",
]  # fmt: skip
