"""Finds out what a kernel of inductor's templates computes (a matrix product, a convolution or attention) from the names of its arguments."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import torch

from maya_core.messages import say
from maya_core.torch_seam.compile import size_hint

LAYOUTS = {
    (True, False): 0,
    (True, True): 1,
    (False, True): 2,
    (False, False): 3,
}  # TN, NN, NT, TT by whether A and B are row-major
# A block mask's counts: how many blocks of keys each block of queries attends to, partly and completely.
BLOCK_COUNTS = ("arg_KV_NUM_BLKS", "arg_FULL_KV_NUM_BLKS")
BLOCKS = ("arg_KV_IDX", "arg_FULL_KV_IDX")


def template_of(kernel: Any) -> dict[str, Any]:
    """The sizes for a kernel of maya_core/ops/kernel.py; empty for other templates."""
    given = kernel.named_input_nodes
    if {"Q", "K", "V"} <= given.keys():
        return _attention(given, backward="DO" in given)
    if {"A", "B"} <= given.keys():
        return _product(given["A"], given["B"], kernel)
    if {"X", "W"} <= given.keys():
        return _convolution(given["X"], given["W"], kernel)
    return {}


def _sizes(values: Any) -> list[int]:
    return [size_hint(value) for value in values]


def _dtype(node: Any, kernel: Any) -> str:
    dtype = node.get_dtype()
    if dtype == torch.float32 and kernel.meta.get("ALLOW_TF32"):
        return "tf32"
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _product(first: Any, second: Any, kernel: Any) -> dict[str, Any]:
    a, b = _sizes(first.get_size()), _sizes(second.get_size())
    layout = LAYOUTS[_sizes(first.get_stride())[-1] == 1, _sizes(second.get_stride())[-1] == 1]
    sizes = [math.prod(a[:-2]), a[-2], b[-1], a[-1], layout]
    return {"kind": "gemm", "dtype": _dtype(first, kernel), "sizes": sizes}


def _convolution(images: Any, filters: Any, kernel: Any) -> dict[str, Any]:
    """Describes a convolution as the matrix product with the same arithmetic."""
    out, weight = _sizes(kernel.output_node.get_size()), _sizes(filters.get_size())
    sizes = [1, out[0] * math.prod(out[2:]), out[1], math.prod(weight[1:]), 0]
    return {"kind": "gemm", "dtype": _dtype(images, kernel), "sizes": sizes}


def _attention(given: dict[str, Any], backward: bool) -> dict[str, Any]:
    batch, heads, queries, width = _sizes(given["Q"].get_size())
    _, shared, keys, _ = _sizes(given["K"].get_size())
    value = _sizes(given["V"].get_size())[-1]
    sizes = [batch, heads, shared, queries, keys, width, value, 0, 0, given["Q"].get_dtype().itemsize]
    return {"kind": "attention", "model": f"flash_{'backward' if backward else 'forward'}", "sizes": sizes}


@functools.cache
def _warn_about_mask() -> None:
    say(
        "the values of a flex_attention block mask are unknown: all blocks are assumed to be computed, which is an upper bound"
    )


def with_mask(template: dict[str, Any], native: ModuleType, given: dict[str, Any]) -> dict[str, Any]:
    """Adds to an attention the share of blocks that its mask keeps, if the values of the mask are known; otherwise all blocks."""
    if template.get("kind") != "attention":
        return template
    seen, whole = 0.0, 0
    for counts, indices in zip(BLOCK_COUNTS, BLOCKS, strict=True):
        if (count := given.get(counts)) is None or not count.is_cuda:
            continue
        if not native.is_known(count) or (index := given.get(indices)) is None:
            _warn_about_mask()
            return {**template, "sizes": [*template["sizes"], 1.0]}
        seen += float(native.host_value(count).sum())
        whole = max(whole, index.numel())
    share = min(1.0, seen / whole) if whole else 1.0
    return {**template, "sizes": [*template["sizes"], share]}
