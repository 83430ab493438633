"""Reductions: gpu_reduce_kernel splits long reductions over blocks, which then meet in a buffer of global memory.

Follows ATen/native/cuda/Reduce.cuh (setReduceConfig).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from maya_core.device.kernels import iterator
from maya_core.device.kernels.call import HALVES, Call, Tensor, Work, kernel


def _last_pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Kind:
    """What a family of reductions is compiled with: vt0, its vector width, bytes of an accumulator."""

    vt0: int = 4
    accumulator: int | None = None  # None: that of the input, at least 4 bytes for halves
    wide_halves: bool = False  # loads halves 8 at a time
    widens: bool = True  # halves are accumulated in float

    def accumulator_bytes(self, source: Tensor) -> int:
        if self.accumulator is not None:
            return self.accumulator
        if source.dtype in HALVES and self.widens:
            return 4
        return source.itemsize


SUM = Kind(wide_halves=True)
ITSELF = Kind(widens=False)  # a maximum is one of the elements
WITH_INDEX = Kind(accumulator=16)
SMALL_INTEGERS = ("Bool", "Byte", "Char", "Short", "Int")
KINDS = {
    "sum": SUM, "nansum": SUM, "mean": Kind(), "prod": Kind(), "amax": ITSELF, "amin": ITSELF, "max": ITSELF, "min": ITSELF,
    "norm": Kind(accumulator=4), "linalg_vector_norm": Kind(accumulator=4), "all": Kind(accumulator=1), "any": Kind(accumulator=1),
    "var": Kind(vt0=2, accumulator=16), "std": Kind(vt0=2, accumulator=16), "var_mean": Kind(vt0=2, accumulator=16), "std_mean": Kind(vt0=2, accumulator=16),
    "argmax": Kind(accumulator=16), "argmin": Kind(accumulator=16), "aminmax": Kind(accumulator=8),
}  # fmt: skip


@dataclass(frozen=True)
class GlobalReduce:
    buffer_bytes: int
    semaphore_bytes: int


def _part(it: iterator.Iterator, kind: Kind, source: Tensor, sms: int, threads_per_sm: int) -> GlobalReduce | None:
    out, inp = it.strides[0], it.strides[1]
    reduced = [d for d in range(len(it.shape)) if out[d] == 0]
    reduce_dims = len(reduced)
    outputs = 1
    for d, size in enumerate(it.shape):
        if d >= reduce_dims:
            outputs *= size
    inputs = it.numel // outputs
    item = source.itemsize
    on_fastest = reduce_dims == len(it.shape) or inp[0] < inp[reduce_dims]
    if it.shape:
        dim0, dim1 = (inputs, outputs) if on_fastest else (outputs, inputs)
        fastest = inp[0] if on_fastest else inp[reduce_dims]
    else:
        dim0 = dim1 = 1
        fastest = item
    vector = 1
    if fastest == item:
        if on_fastest and dim0 >= 128 and reduce_dims == 1:
            dim0 //= 8 if kind.wide_halves and item == 2 else kind.vt0
        elif not on_fastest:
            vector = 4
            for number in [it.shape[reduce_dims]] + [inp[d] // item for d in range(len(it.shape)) if d != reduce_dims]:
                while number % vector:
                    vector //= 2
            dim0 //= vector
    threads = (256 if source.dtype == "ComplexDouble" else 512) // vector
    dim0_pow2 = _last_pow2(dim0) if dim0 < threads else threads
    dim1_pow2 = _last_pow2(dim1) if dim1 < threads else threads
    width = min(dim0_pow2, 32)
    height = min(dim1_pow2, threads // width)
    width = min(dim0_pow2, threads // height)
    step_input = step_output = 1
    if on_fastest:
        step_input *= width
    else:
        step_output *= width
    across_warps = _div_up(inputs, step_input) >= min(height * 16, 256)
    if across_warps:
        step_input *= height
    else:
        step_output *= height
    target = sms * (threads_per_sm // (width * height))
    grid = _div_up(outputs // vector, step_output)
    per_thread = _div_up(inputs, step_input)
    if not (across_warps and per_thread >= 256 and grid <= target):
        return None
    ctas = max(min(_div_up(target, grid), _div_up(per_thread, 16)), _div_up(per_thread, 256))
    if ctas <= 1:
        return None
    size = kind.accumulator_bytes(source) * outputs * ctas
    if not on_fastest:
        size *= width * vector
    return GlobalReduce(size, 4 * grid)


def _reduced(source: Tensor, dims: list[int]) -> set[int]:
    rank = len(source.sizes)
    return {d % rank for d in dims} if dims and rank else set(range(rank))


def reduction_parts(
    source: Tensor, dims: list[int], kind: Kind, sms: int, threads_per_sm: int
) -> list[GlobalReduce | None]:
    """One entry per kernel launched: what it needs of global memory, if anything."""
    rank = len(source.sizes)
    reduced = _reduced(source, dims)
    kept = 1
    out_strides = [0] * rank
    for d in range(rank - 1, -1, -1):
        if d not in reduced:
            out_strides[d] = kept * source.itemsize
            kept *= source.sizes[d]
    in_strides = [stride * source.itemsize for stride in source.strides]
    whole = iterator.make(list(source.sizes), [out_strides, in_strides], reduction=True)
    # a dimension of one that is kept has stride 0 too, but nothing to reduce
    return [_part(part, kind, source, sms, threads_per_sm) for part in iterator.splits(whole)]


def add_input_copy(work: Work, source: Tensor) -> Work:
    """Kernels that want their input contiguous copy it first."""
    if not source.is_contiguous:
        work.temporary(source.nbytes)
        work.launches += 1
    return work


def add_reduction(
    work: Work, source: Tensor, dims: list[int], call: Call, kind: Kind = SUM, result: Tensor | None = None
) -> Work:
    """Adds the kernels of a reduction, with their buffers, to work that has allocated its output (`result`, if not of the input's dtype)."""
    if source.numel == 0:
        work.launches += 1
        return work
    parts = reduction_parts(source, dims, kind, call.sms, call.threads_per_sm)
    between = None
    if len(parts) > 1:  # what one part has accumulated the next goes on with: in the output, if that is wide enough
        outputs = source.numel // math.prod(source.sizes[d] for d in _reduced(source, dims))
        if (result.itemsize if result else source.itemsize) < kind.accumulator_bytes(source):
            between = work.temporary(outputs * kind.accumulator_bytes(source))
    for part in parts:
        work.launches += 1
        if part is not None:
            buffer = work.temporary(part.buffer_bytes)
            semaphores = work.temporary(part.semaphore_bytes)
            work.launches += 1  # the semaphores are zeroed first
            work.free(semaphores, buffer)
    if between is not None:
        work.free(between)
    return work


def _dims(call: Call) -> list[int]:
    dim = call.get("dim")
    if dim is None:
        return []
    return dim if isinstance(dim, list) else [dim]


def _as_accumulated(call: Call, source: Tensor) -> Tensor:
    """The input as the reduction reads it: sums of small integers and of other dtypes are cast before, halves as they are read."""
    if call.name in ("sum", "nansum", "prod") and source.dtype in SMALL_INTEGERS and call.get("dtype") is None:
        return source._replace(dtype="Long")
    if (
        call.get("dtype") is not None
        and call.results
        and source.itemsize >= 4
        and call.results[0].dtype != source.dtype
    ):
        return source._replace(dtype=call.results[0].dtype)
    return source


@kernel(*KINDS)
def reduce(call: Call) -> Work:
    source, kind = call.inputs[0], KINDS[call.name]
    if (
        call.op.endswith((".other", ".out"))
        and call.name in ("max", "min")
        and len(call.inputs) > 1
        and not isinstance(call.arguments[1], int)
    ):
        return Work()  # of two tensors, elementwise
    work = Work(launches=0).out(*range(len(call.results)))
    everything = call.get("dim") is None
    if call.name in ("max", "min", "argmax", "argmin") and everything:
        add_input_copy(work, source)
    if call.name in ("max", "min") and not everything:
        kind = WITH_INDEX
    if (read := _as_accumulated(call, source)) is not source:
        source = read
        work.launches += 1
        work.temporary(source.nbytes)
    return add_reduction(work, source, _dims(call), call, kind, call.results[-1] if call.results else None)
