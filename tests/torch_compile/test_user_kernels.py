"""The program's own Triton kernels are recorded with name, grid and memory traffic, and never compiled."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import maya_core
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.plan import kernels_of
from maya_core.predictor.pricing import Predictor
from maya_core.torch_compile.source import use_of


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def scale_kernel(x_ptr, table_ptr, n, BLOCK: tl.constexpr):
    """Scales in place by a factor that is loaded from a table."""
    pointers = x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.load(table_ptr + tl.program_id(0))
    value = tl.load(pointers)
    tl.store(pointers, value * which)


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, k, BLOCK: tl.constexpr):
    a = a_ptr + tl.arange(0, BLOCK)[:, None] * k + tl.arange(0, BLOCK)[None, :]
    b = b_ptr + tl.arange(0, BLOCK)[:, None] * k + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(k):
        total += tl.dot(tl.load(a), tl.load(b))
        a += BLOCK
        b += BLOCK
    c = c_ptr + tl.arange(0, BLOCK)
    tl.store(c, total)


def test_reads_and_writes_are_told_by_the_source() -> None:
    def told(kernel: Any) -> tuple[set[str], set[str], bool]:
        use = use_of(kernel)
        return *({name for name in names if name.endswith("_ptr")} for names in use[:2]), use.multiplies

    assert told(add_kernel.fn) == ({"x_ptr", "y_ptr"}, {"out_ptr"}, False)
    assert told(scale_kernel.fn.fn) == ({"x_ptr", "table_ptr"}, {"x_ptr"}, False)
    assert told(product_kernel.fn) == ({"a_ptr", "b_ptr"}, {"c_ptr"}, True)


@triton.jit
def zero_kernel(out_ptr, n, BLOCK: tl.constexpr = 1024):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, 0.0, mask=offsets < n)


def test_a_grid_is_told_the_defaults() -> None:
    with maya_core.emulate("h100") as job:
        out = torch.empty(5000, device="cuda")
        zero_kernel[lambda told: (triton.cdiv(5000, told["BLOCK"]),)](out, 5000)
    (call,) = [one for one in job.trace.calls if one.op == "triton::zero_kernel"]
    assert [5, 1, 1] in [list(one) if isinstance(one, list | tuple) else one for one in call.arguments]


def test_a_launch_is_a_kernel_of_the_trace() -> None:
    before = triton.runtime.jit.JITFunction.run, triton.runtime.autotuner.Autotuner.run
    with maya_core.emulate("h100") as job:
        x, y = torch.ones(2**20, device="cuda"), torch.ones(2**20, device="cuda")
        out = torch.empty_like(x)
        add_kernel[lambda given: (triton.cdiv(2**20, given["BLOCK"]),)](x, y, out, 2**20, BLOCK=1024)
        scale_kernel[(8192,)](x, y, 2**20)
        assert scale_kernel.best_config.kwargs == {"BLOCK": 128}
    calls = {one.op: one for one in job.trace.calls}
    added = calls["triton::add_kernel"]
    assert len(kernels_of(added, Platform(find_gpu("a100")))) == 1
    assert [1024, 1, 1] in [list(one) if isinstance(one, list | tuple) else one for one in added.arguments]
    assert "triton::scale_kernel" in calls
    assert (triton.runtime.jit.JITFunction.run, triton.runtime.autotuner.Autotuner.run) == before
    # Three tensors of 4 MiB at 3.35 TB/s are 3.8 us.
    seconds = Predictor(find_gpu("h100")).ops([added]).seconds[0]
    assert 3.7e-6 < seconds < 12e-6


@triton.jit
def embedding_kernel(table_ptr, ids_ptr, out_ptr, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0) * width + columns, tl.load(table_ptr + row * width + columns))


@triton.jit
def scatter_kernel(grad_ptr, ids_ptr, table_ptr, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + tl.program_id(0))
    tl.atomic_add(table_ptr + row * width + columns, tl.load(grad_ptr + tl.program_id(0) * width + columns))


@triton.jit
def softmax_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Reads its rows twice."""
    x_ptr += tl.program_id(0) * width
    total = 0.0
    for start in range(0, width, BLOCK):
        total += tl.sum(tl.exp(tl.load(x_ptr + start + tl.arange(0, BLOCK))))
    for start in range(0, width, BLOCK):
        value = tl.exp(tl.load(x_ptr + start + tl.arange(0, BLOCK)))
        tl.store(out_ptr + tl.program_id(0) * width + start + tl.arange(0, BLOCK), value / total)


def test_addresses_that_are_looked_up_and_rows_that_are_read_again() -> None:
    assert use_of(embedding_kernel.fn).gathers == {"table_ptr"} and not use_of(embedding_kernel.fn).adds
    assert use_of(scatter_kernel.fn).gathers == {"table_ptr"} and use_of(scatter_kernel.fn).adds
    assert (use_of(softmax_kernel.fn).rereads, use_of(softmax_kernel.fn).gathers) == (1, set())
    assert use_of(add_kernel.fn)[2:] == (set(), False, False, 0)


def seconds(kernel: Any, programs: int, *tensors: torch.Size) -> float:
    with maya_core.emulate("a100") as job:
        given = [torch.empty(one, device="cuda", dtype=torch.long if len(one) == 1 else None) for one in tensors]
        kernel[(programs,)](*given, tensors[-1][1], BLOCK=1024)
    (call,) = [one for one in job.trace.calls if one.op.startswith("triton::")]
    return float(Predictor(find_gpu("a100")).ops([call]).seconds[0])


def test_of_a_table_only_what_is_looked_up_is_read() -> None:
    ids, out = torch.Size([16384]), torch.Size([16384, 1024])
    small, large = (seconds(embedding_kernel, 16384, torch.Size([rows, 1024]), ids, out) for rows in (16384, 131072))
    assert small == large
    assert small < seconds(embedding_kernel, 16384, out, ids, torch.Size([131072, 1024]))


def test_rows_that_caches_hold_are_read_once() -> None:
    """The same number of bytes in short rows, of which the L2 cache of an A100 holds two for each SM, and in long rows, of which it does not."""
    short, long = (
        seconds(softmax_kernel, 2**28 // width, *[torch.Size([2**28 // width, width])] * 2) for width in (8192, 131072)
    )
    assert 1.4 < long / short < 1.6
