"""What each op does on a GPU, with one file for each family of ops: its results where torch's Meta kernel cannot describe them, what happens
to known values, the kernels that it launches, its temporaries in order, and its floating-point operations.

Figures are those of torch 2.13's CUDA kernels; each file names the ATen sources that it follows. A program can describe ops of its own in the
same way: docs/extending.md has an example.
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
    nested,
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
    attention, convolution, elementwise, foreach, images, indexing, linalg, losses, nested, normalization, packages, products, quantization,
    random, recurrent, reductions, selection, shards, sorting, sparse,
)  # fmt: skip

__all__ = [
    "FAMILIES", "Attention", "Call", "Convolution", "Copy", "Gemm", "Kernel", "Platform", "Rules", "Streaming", "Tensor", "Timed", "Work",
    "flops_of", "kernels_of", "op", "plan", "rule", "streaming",
]  # fmt: skip
