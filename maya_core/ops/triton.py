"""Kernels written in Triton, described by their bytes and their memory pattern; products and attention of templates are described as such.

No coefficients were fitted to them. The patterns are those of ATen, so durations are extrapolated (tests/accuracy/triton_kernels.py compares
them with Liger's measurements). Patterns that depend on how ATen implements a kernel (norms and softmaxes process a row with a block) are not
used: a generated row reduction keeps its row on the chip or reads it again, and is bound by memory.
"""

from __future__ import annotations

import math

from maya_core.ops.kernel import Generated, Kernel, TritonAttention, TritonGemm
from maya_core.ops.traffic import moved
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor
from maya_core.trace.triton_kernel import TritonKernel

# Fused ops that change the pattern of an otherwise elementwise kernel.
GATHERS = {"embedding", "index", "gather", "index_select", "_unsafe_index"}
DRAWS = {"inductor_random", "rand", "randn", "native_dropout", "inductor_seeds"}


def launched(call: Call, kernel: TritonKernel) -> Work:
    tensors = [one for one in (*call.arguments, *call.outputs) if isinstance(one, Tensor)]
    if kernel.template:
        return Work().launch(_template(kernel, tensors))
    given = call.arguments[-2] if len(call.arguments) > 1 else []
    numels = _numels(kernel, given if isinstance(given, list) else [])
    elements = math.prod(numels.values()) if numels else max((one.numel for one in tensors), default=1)
    if kernel.nbytes is None:
        total = float(sum(map(moved, tensors)))
    else:
        hinted = math.prod(kernel.numels.values()) if kernel.numels else elements
        total = kernel.nbytes * elements / max(1, hinted)
    outputs = [one for one in call.outputs if isinstance(one, Tensor)]
    if kernel.atomic and kernel.numels and outputs:
        # Inductor counts the rows of the output, but each addition reads and writes a row, even if several add to the same one.
        total = max(total, 3.0 * elements * outputs[0].itemsize)
    written = min(total, float(sum(map(moved, outputs))))
    row = math.prod(size for axis, size in numels.items() if axis.startswith("r")) if kernel.reductions else 0
    if kernel.kind == "user" and kernel.rereads:  # each program processes its share of the elements
        row = elements // max(1, math.prod(call.arguments[-3]))
    return Work().launch(Generated(pattern(kernel), total - written, written, elements, row, kernel.rereads))


def _numels(kernel: TritonKernel, given: list[int]) -> dict[str, int]:
    """The sizes of this launch. Either all of them are arguments of the kernel, or it is launched with those for which it was generated."""
    if len(given) == len(kernel.numels):
        return dict(zip(kernel.numels, given, strict=True))
    return kernel.numels


def pattern(kernel: TritonKernel) -> str:
    if kernel.atomic:
        return "scatter"
    if kernel.reductions:
        return "column_reduction" if kernel.hint.startswith("OUTER") else "reduction"
    ops = set(kernel.ops)
    if ops & DRAWS:
        return "dropout" if kernel.loads else "random"
    if not kernel.loads and kernel.stores:
        return "fill"
    return "gather" if ops & GATHERS else "elementwise"


def _template(kernel: TritonKernel, tensors: list[Tensor]) -> Kernel:
    sizes = kernel.template
    if sizes["kind"] == "attention":
        return TritonAttention.of(sizes["model"], sizes["sizes"])
    traffic = (kernel.nbytes or sum(map(moved, tensors))) * 1.0
    config = kernel.config
    tile = (config.get("BLOCK_M", 64), config.get("BLOCK_N", 64), config.get("BLOCK_K", 32))
    return TritonGemm.of(sizes["dtype"], (*sizes["sizes"], *tile, kernel.warps, kernel.stages, traffic))
