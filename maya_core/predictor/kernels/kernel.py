"""A kernel as the predictors see it, a call as the tables see it, and the bytes that tensors move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from maya_core.device.kernels.call import HALVES, ITEM_BYTES, Signature, Tensor, packed, tensors_in

SECTOR = 32  # bytes that DRAM is read and written by


class Kernel(NamedTuple):
    """One launch.

    | family | model | sizes |
    |---|---|---|
    | gemm | dtype | batch, m, n, k, layout (0 TN, 1 NN, 2 NT, 3 TT) of C[m,n] = A[m,k] @ B[k,n] |
    | grouped_gemm | dtype | groups, rows m of all groups, n, k of one, layout |
    | attention | backend_forward, backend_backward | batch, heads, kv heads, queries, keys, head, value head, causal, window or 0, item bytes |
    | convolution | dtype | direction (0 forward, 1 input's gradient, 2 weight's), batch, channels in, out, groups, input pixels, output pixels, kernel volume, channels last, stride product |
    | recurrent | dtype | direction (0 forward, 1 backward), gates, layers, directions, steps, batch, input, hidden, item bytes |
    | memory | pattern | bytes read, bytes written, elements, row length (0: no rows) |
    | triton | pattern | as memory, with what inductor counts; then how often rows are read again |
    | triton_gemm | dtype | as gemm; then tile m, n, k, warps, stages, bytes with what is fused |
    | triton_attention | as attention | as attention, then the share of blocks that a mask leaves |
    | copy | h2d, d2h, d2d | bytes |
    | included | | none: its time is part of another kernel of the same call, which was measured with it |
    """

    family: str
    model: str
    sizes: tuple[float, ...]


class Op:
    """A signature with its arguments by name."""

    __slots__ = ("arguments", "launches", "name", "named", "overload", "results")

    def __init__(self, signature: Signature) -> None:
        base, _, self.overload = signature.op.rpartition("::")[2].partition(".")
        self.name: str = base
        self.launches = signature.launches
        self.arguments = signature.arguments
        self.named: dict[str, Any] = dict(zip(signature.names, signature.arguments, strict=False))
        self.results: list[Tensor] = []
        for output in signature.outputs:
            if isinstance(output, Tensor):
                self.results.append(output)
            else:
                self.results.extend(tensors_in(output))

    def get(self, name: str, default: Any = None) -> Any:
        return self.named.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    @property
    def inputs(self) -> list[Tensor]:
        """Every tensor given, but for those given to be written (`out=`)."""
        found: list[Tensor] = []
        out = self.named.get("out")
        for argument in self.arguments:
            if argument is out and out is not None:
                continue
            if isinstance(argument, Tensor):
                found.append(argument)
            elif isinstance(argument, list):
                found.extend(tensors_in(argument))
        return found

    def tensor(self, reference: str) -> Tensor | None:
        """An argument by name, or a result by number; None if there is none, or none was given."""
        if reference.isdigit():
            place = int(reference)
            return self.results[place] if place < len(self.results) else None
        value = self.named.get(reference)
        return value if isinstance(value, Tensor) else None


Chain = Callable[[Op], list[Kernel]]
CHAINS: dict[str, Chain] = {}


def chain(*names: str) -> Callable[[Chain], Chain]:
    """Registers which kernels ops launch, by their name without namespace and overload."""

    def register(each: Chain) -> Chain:
        for name in names:
            CHAINS[name] = each
        return each

    return register


def moved(tensor: Tensor) -> int:
    """Bytes that reading or writing a whole tensor moves: what is expanded once, what lies scattered by whole sectors."""
    if tensor.device == "cpu":
        return 0
    item = ITEM_BYTES.get(tensor.dtype, 1)
    count, step = 1, 0
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        if size == 0:
            return 0
        if stride and size != 1:
            count *= size
            if not step or stride < step:
                step = stride
    if step > 1:
        return count * min(step * item, max(item, SECTOR))
    return count * item


def memory(
    model: str,
    reads: Iterable[Tensor | None] = (),
    writes: Iterable[Tensor | None] = (),
    *,
    row: int = 0,
    elements: int | None = None,
) -> Kernel:
    read = sum([moved(tensor) for tensor in reads if tensor is not None])
    count = elements or 0
    written = 0
    for tensor in writes:
        if tensor is not None:
            written += moved(tensor)
            if elements is None:
                count = max(count, tensor.numel)
    return Kernel("memory", model, (read, written, count, row))


def bytes_moved(model: str, read: float, written: float, elements: float, row: float = 0) -> Kernel:
    return Kernel("memory", model, (read, written, elements, row))


def helper(nbytes: float = 4) -> Kernel:
    """A launch that prepares a few numbers: semaphores zeroed, the state of a scan, one block that adds up."""
    return Kernel("memory", "fill", (0, nbytes, max(nbytes / 4, 1), 0))


INCLUDED = Kernel("included", "", ())


def contiguous_copy(tensor: Tensor | None) -> list[Kernel]:
    """The copy that kernels make of an input they want contiguous."""
    if tensor is None or tensor.is_contiguous:
        return []
    return [relaid(tensor, tensor._replace(strides=packed(tensor.sizes)))]


def relaid(source: Tensor, to: Tensor) -> Kernel:
    return memory(layout([source], to), [source], [to])


def _fastest(tensor: Tensor) -> tuple[int, int] | None:
    """The dimension that moves fastest in memory, counted from the last, and its stride."""
    best: tuple[int, int] | None = None
    for place, (size, stride) in enumerate(zip(reversed(tensor.sizes), reversed(tensor.strides), strict=True)):
        if size > 1 and stride and (best is None or stride < best[1]):
            best = (place, stride)
    return best


FLOATS = ("Float", "Double", *HALVES)


def pattern(inputs: list[Tensor], result: Tensor) -> str:
    """The pattern of an elementwise kernel."""
    model = layout(inputs, result)
    if model == "elementwise":
        # operands of several floating dtypes are read with a cast each, without vectors (Loops.cuh, LoadWithCast)
        floats = {tensor.dtype for tensor in inputs if tensor.dtype in FLOATS and tensor.sizes}
        if len(floats) > 1 or (floats and result.dtype in FLOATS and result.dtype not in floats):
            return "cast"
    return model


def layout(inputs: Iterable[Tensor], result: Tensor) -> str:
    """How an elementwise kernel walks its operands (Loops.cuh, TensorIterator.cpp).

    All alike: vectorized. Broadcast or with gaps: by an offset calculator, "strided". Where a large operand moves
    fastest along another dimension than the result does, one of the two is not coalesced: "transpose".
    """
    found = "elementwise"
    sizes, strides = result.sizes, result.strides
    for tensor in inputs:
        if tensor.sizes == sizes and tensor.strides == strides:
            continue
        if tensor.numel <= 1:
            if (
                tensor.device == "cuda"
            ):  # a number of the host's is an argument, one on the device is read by every thread
                found = "strided"
            continue
        if tensor.is_contiguous and result.is_contiguous and tensor.numel == result.numel:
            continue
        found = "strided"
        if 4 * moved(tensor) >= moved(result):
            one, other = _fastest(tensor), _fastest(result)
            if one is not None and other is not None and one[0] != other[0]:
                return "transpose"
    if found == "elementwise" and not result.is_dense:
        return "strided"
    return found


def row_of(tensor: Tensor, dim: int | list[int] | None) -> int:
    """Elements along these dimensions, all of them if none are given."""
    if not tensor.sizes:
        return 1
    if dim is None or dim == []:
        return max(tensor.numel, 1)
    dims = dim if isinstance(dim, list) else [dim]
    return max(math.prod(tensor.sizes[d] for d in dims), 1)
