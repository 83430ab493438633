"""Sorting, top-k, prefix sums and random orders. Follows Sort.cpp, SortStable.cu, TensorTopK.cu, ScanKernels.cpp, Randperm.cu of ATen/native/cuda, and cub."""

from __future__ import annotations

from maya_core.device.kernels.call import Tensor
from maya_core.predictor.kernels.kernel import Kernel, Op, bytes_moved, chain, contiguous_copy, helper, memory, moved

DIGIT_BYTES = 256 * 8
SMALL_SORT = 4096
BEFORE_PASSES = 4  # launches of a one-sweep sort before its passes: two memsets, histogram, prefix sum


def radix_sort(n: int, key: int, value: int, launches: int) -> list[Kernel]:
    """As many launches as the device counted: one block, or a memset and a sweep for each pass after a histogram (cub)."""
    one_pass = bytes_moved("sort", n * (key + value), n * (key + value), n)
    if launches <= 0:
        return []
    if launches <= BEFORE_PASSES + 1 or launches % 2:  # one tile, or passes of three kernels with a spine
        return [
            one_pass if place % 3 == launches % 3 - 1 or launches == 1 else helper(DIGIT_BYTES)
            for place in range(launches)
        ]
    histogram = bytes_moved("reduction", n * key, DIGIT_BYTES, n, n)
    passes = (launches - BEFORE_PASSES) // 2
    return [helper(), helper(DIGIT_BYTES), histogram, helper(DIGIT_BYTES), *[helper(DIGIT_BYTES), one_pass] * passes]


def sort_launches(largest: int) -> int:
    """Launches of a sort of many keys from 0 to `largest`, 8 bits a pass."""
    return BEFORE_PASSES + 2 * -(-max(1, largest.bit_length()) // 8)


def _length(source: Tensor, dim: int) -> int:
    return source.sizes[dim] if source.sizes else 1


def _copied(source: Tensor) -> Kernel:
    return Kernel("copy", "d2d", (source.nbytes,)) if source.is_dense else memory("strided", [source], [source])


@chain("sort")
def sort(op: Op) -> list[Kernel]:
    source = op.inputs[0]
    length, n, item = _length(source, op.get("dim", -1)), source.numel, source.itemsize
    pairs = n * (item + 8)
    if not source.sizes or length <= SMALL_SORT:
        kernels = [
            _copied(source), helper(8 * length), bytes_moved("strided", 8 * length, 8 * n, n), _copied(source),
            bytes_moved("sort", pairs, pairs, n, length),
        ]  # fmt: skip
        return kernels[: op.launches]
    numbered = bytes_moved("fill", 0, 8 * n, n)
    turned = []
    if not (source.is_dense and source.strides[op.get("dim", -1)] == 1):
        turned = [bytes_moved("transpose", n * each, n * each, n) for each in (item, item, 8)]
    left = op.launches - 2 - len(turned)
    segments = n // max(length, 1)
    if left == -(-8 * item // 6) and segments > 1:
        passes = [bytes_moved("sort", pairs, pairs, n, length)] * left
    else:
        passes = radix_sort(n, item, 8, left)
    return [_copied(source), numbered, *passes, *turned]


@chain("topk")
def topk(op: Op) -> list[Kernel]:
    """One block for each slice selects, or for long ones all blocks count digits, 8 bits at a time (TensorTopK.cu)."""
    source = op.inputs[0]
    length = _length(source, op.get("dim", -1))
    slices = source.numel // max(length, 1)
    k = op["k"]
    copies = contiguous_copy(source)
    written = sum(map(moved, op.results))
    last = [bytes_moved("sort", written, written, slices * k, k)] if op.get("sorted", True) and k > 1 else []
    digits = source.itemsize
    # a digit at a time, the whole slice is read
    select = bytes_moved("select", source.nbytes * (1 + digits), written, source.numel, length)
    if op.launches <= len(copies) + len(last) + 1:
        return [*copies, select, *last]
    counts = bytes_moved("reduction", source.nbytes, 1024 * slices, source.numel, length)
    small = helper(1024 * slices)
    gathered = bytes_moved("select", source.nbytes, written, source.numel, length)
    return [
        *copies, helper(8 * slices), small, helper(4 * slices), *[counts, small, small] * digits, small,
        helper(), small, helper(), small, gathered, *last,
    ]  # fmt: skip


@chain("cumsum", "cumprod", "logcumsumexp", "_logcumsumexp", "_cummax_helper", "_cummin_helper")
def scan(op: Op) -> list[Kernel]:
    source = op.inputs[0]
    result = op.results[0] if op.results else source
    before: list[Kernel] = []
    if source.dtype != result.dtype or not source.is_contiguous:
        before = [memory("cast" if source.dtype != result.dtype else "strided", [source], [result])]
    row = _length(source, op.get("dim", 0))
    flat = source.sizes and source.numel == row
    kernel = memory("scan", [result], op.results or [source], row=0 if flat else row)
    return [*before, *[helper()] * max(0, op.launches - len(before) - 1), kernel]


@chain("randperm")
def randperm(op: Op) -> list[Kernel]:
    """Random keys, sorted with the numbers they came with; ties are shuffled after."""
    result = op.results[0]
    n, item = result.numel, result.itemsize
    key = 4 if n < 2**15 else 8
    return [
        helper(), bytes_moved("fill", 0, n * item, n), bytes_moved("random", 0, n * key, n),
        *radix_sort(n, key, item, op.launches - 4), bytes_moved("elementwise", n * key, 0, n),
    ]  # fmt: skip


@chain("bincount")
def bincount(op: Op) -> list[Kernel]:
    source = op.inputs[0]
    whole = bytes_moved("reduction", source.nbytes, 8, source.numel, source.numel)
    read_back = Kernel("copy", "d2h", (8,))
    counted = bytes_moved("scatter", source.nbytes, sum(map(moved, op.results)), source.numel)
    return [whole, read_back, whole, read_back, counted]
