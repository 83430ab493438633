"""Random numbers and dropout. Follows Distributions.cu, Dropout.cu and Randperm.cu of ATen/native/cuda."""

from __future__ import annotations

import math

from maya_core.hardware.platform import Platform
from maya_core.ops.cub import radix_sort
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.kernel import Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import Assume, aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.work import Work
from maya_core.trace.call import Call

DRAWN_IN_PLACE = aten(
    "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_",
    "_philox_normal_", "_philox_uniform_",
)  # fmt: skip


@op(*DRAWN_IN_PLACE)
def drawn(call: Call, platform: Platform) -> Work:
    """Fills a tensor, which is written and not read."""
    return Work().launch(*one_kernel("random", call.inputs[1:], call.results or call.inputs[:1]))


@op(*aten("bernoulli", "binomial", "normal", "poisson", "_standard_gamma", "_sample_dirichlet", "_dirichlet_grad", "_standard_gamma_grad"))  # fmt: skip
def drawn_from(call: Call, platform: Platform) -> Work:
    """Draws with parameters that are tensors themselves."""
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


@op("aten::native_dropout")
def dropout(call: Call, platform: Platform) -> Work:
    """Allocates the mask before the result."""
    return Work().out(1, 0).launch(*one_kernel("dropout", call.inputs, call.results))


@op("aten::_fused_dropout")
def fused_dropout(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel("dropout", call.inputs, call.results))


@op("aten::randperm")
def randperm(call: Call, platform: Platform) -> Work:
    """Sorts the numbers by random keys, which have enough bits that few are equal, then shuffles ties."""
    result = call.results[0]
    n, item = result.numel, result.itemsize
    key_bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12)))) if n > 1 else 1
    key = 4 if key_bits <= 32 else 8
    work = Work().out(0)
    work.free(work.temporary(8))
    for nbytes in (result.nbytes, n * key, n * key):
        work.temporary(nbytes)
    work.launch(small(), Streaming("fill", 0, n * item, n), Streaming("random", 0, n * key, n))
    return radix_sort(work, platform, n, key, item, key_bits).launch(Streaming("elementwise", n * key, 0, n))


@op("aten::multinomial")
def multinomial(call: Call, platform: Platform) -> Work:
    """Checks the probabilities, divides them by exponential samples, and takes the largest (Distributions.cpp). Since torch 2.12 the
    smallest and largest probability are found in one pass."""
    source = call.inputs[0]
    row = source.sizes[-1]
    rows = source.numel // max(row, 1)
    whole = Streaming("reduction", source.nbytes, 4, source.numel, source.numel)
    by_row = Streaming("reduction", source.nbytes, 4 * rows, source.numel, row)
    of_rows = Streaming("reduction", 4 * rows, 4, rows, rows)
    work = Work()
    if platform.since(2, 12):
        for _ in ("smallest", "largest"):
            work.temporary(source.itemsize)
        work.launch(whole, *[small()] * 4)
    else:
        work.launch(whole, small(), whole, *[small()] * 3)
    for nbytes in (1, 1, source.nbytes):  # the answers of two checks, and the quotients
        work.temporary(nbytes)
    return work.out(0).launch(
        by_row, small(), of_rows, small(), small(),
        Streaming("random", 0, source.nbytes, source.numel),
        Streaming("elementwise", 2 * source.nbytes, source.nbytes, source.numel),
        by_row,
    )  # fmt: skip


values(*DRAWN_IN_PLACE[:8], only_writes=True)
values("aten::multinomial", assume=Assume.RANDOM_INDICES)


# ---- results ----
@describe("aten::_standard_gamma_grad", "aten::_dirichlet_grad", "aten::_sample_dirichlet", "aten::binomial")
def like_first(self: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(self)
