"""The cases that `maya calibrate measure` times: the usual shapes of transformer training, one kernel per case.

A case creates its tensors and calls one ATen op. Which kernel that launches is decided by the same rules as for a trace. The timing
itself is done in `measure.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from maya_core.hardware.catalog import Gpu
from maya_core.hardware.dtypes import DTYPES
from maya_core.hardware.platform import Platform
from maya_core.ops.attention_choice import settled
from maya_core.ops.kernel import Kernel
from maya_core.ops.plan import kernels_of
from maya_core.torch_seam.dispatcher import schema as schema_of
from maya_core.torch_seam.version import installed
from maya_core.trace.call import Call, Tensor

aten = torch.ops.aten
MIB = 2**20
NAMES = {f"torch.{dtype.name}": name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class CalibrationCase:
    """One op on its own tensors. `make` allocates them and returns the call to time."""

    name: str
    make: Callable[[], Callable[[], Any]]
    nbytes: int  # approximate memory; cases that are too large for the GPU are skipped


@dataclass(frozen=True)
class OpCall:
    """A call of one ATen op."""

    op: Any  # an overload, such as torch.ops.aten.mm.default
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.op(*self.arguments)


def kernel_of(gpu: Gpu, call: OpCall, results: Any) -> Kernel | None:
    """The kernel that a call launches, including launches that are only measured together with it; None if there are several."""
    schema = schema_of(call.op)
    given = list(call.arguments) + [argument.default_value for argument in schema.arguments[len(call.arguments) :]]
    outputs = results if isinstance(results, tuple) else (results,)
    platform = Platform(gpu, installed().version)
    made = Call(
        schema.name + (f".{schema.overload_name}" if schema.overload_name else ""),
        [argument.name for argument in schema.arguments],
        [_described(argument) for argument in given],
        [_described(output) for output in outputs if isinstance(output, torch.Tensor)],
    )
    kernels = [kernel for kernel in kernels_of(settled(made, platform), platform) if kernel.family != "included"]
    return kernels[0] if len(kernels) == 1 else None


def _described(value: Any) -> Any:
    """A tensor as the emulated device describes it to its rules."""
    if isinstance(value, torch.Tensor):
        return Tensor(NAMES[str(value.dtype)], tuple(value.shape), tuple(value.stride()), value.device.type)
    return [_described(each) for each in value] if isinstance(value, (list, tuple)) else value


def _new(*sizes: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=device).normal_(std=0.02)


def cases(*, quick: bool = False) -> Iterator[CalibrationCase]:
    yield from products(quick)
    yield from attention(quick)
    yield from memory_bound(quick)
    yield from copies(quick)


def products(quick: bool) -> Iterator[CalibrationCase]:
    """Forward (x W'), gradient of the input (g W) and gradient of the weight (g' x) of a transformer's linear layers."""
    hidden = (1024, 2048, 4096, 8192) if not quick else (1024, 4096)
    tokens = (256, 1024, 4096, 16384) if not quick else (512, 8192)
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if not quick else (torch.bfloat16, torch.float32)
    for dtype in dtypes:
        for width in hidden:
            for n, k in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
                for m in tokens:
                    for layout in ("TN", "NN", "NT") if not quick else ("TN", "NT"):
                        if dtype == torch.float32 and m * n * k > 2**37:
                            continue  # it would take seconds per run
                        item = dtype.itemsize
                        yield CalibrationCase(
                            f"mm {layout} {m} x {n} x {k} {dtype}",
                            _product(layout, m, n, k, dtype),
                            item * (m * k + n * k + m * n),
                        )


def _product(layout: str, m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[], OpCall]:
    def make() -> OpCall:
        first = _new(k, m, dtype=dtype).t() if layout[0] == "N" and layout != "NN" else _new(m, k, dtype=dtype)
        second = _new(n, k, dtype=dtype).t() if layout == "TN" else _new(k, n, dtype=dtype)
        return OpCall(aten.mm.default, (first, second))

    return make


def attention(quick: bool) -> Iterator[CalibrationCase]:
    """Causal attention by flash, memory-efficient and cuDNN kernels. With flash and cuDNN, backward is one kernel, or is
    measured as one."""
    lengths = (512, 1024, 2048, 4096, 8192) if not quick else (1024, 4096)
    heads = ((16, 64), (32, 128)) if not quick else ((32, 128),)
    for backend in ("flash", "efficient", "cudnn"):
        for count, width in heads:
            for length in lengths:
                for batch in (1, max(2, 16384 // length)) if not quick else (max(1, 8192 // length),):
                    for backward in (False, True) if backend != "efficient" else (False,):
                        nbytes = 2 * 8 * batch * count * length * width
                        name = f"{backend} attention{' backward' * backward} {batch} x {count} x {length} x {width}"
                        yield CalibrationCase(name, _attention(backend, backward, batch, count, length, width), nbytes)


def _attention(backend: str, backward: bool, batch: int, heads: int, length: int, width: int) -> Callable[[], OpCall]:
    def make() -> OpCall:
        # the layout that modules create: tokens before heads in memory
        query, key, value, grad = (_new(batch, length, heads, width).transpose(1, 2) for _ in range(4))
        if backend == "flash":
            call = OpCall(aten._scaled_dot_product_flash_attention.default, (query, key, value, 0.0, True))
            if backward:
                out, lse, *rest, seed, offset, _ = call()
                given = (grad, query, key, value, out, lse, *rest, 0.0, True, seed, offset)
                return OpCall(aten._scaled_dot_product_flash_attention_backward.default, given)
        elif backend == "efficient":
            call = OpCall(
                aten._scaled_dot_product_efficient_attention.default, (query, key, value, None, False, 0.0, True)
            )
        else:
            given = (query, key, value, None, backward, 0.0, True)
            call = OpCall(aten._scaled_dot_product_cudnn_attention.default, given)
            if backward:
                out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = call()
                given = (grad, query, key, value, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True)
                return OpCall(aten._scaled_dot_product_cudnn_attention_backward.default, given)
        return call

    return make


def memory_bound(quick: bool) -> Iterator[CalibrationCase]:
    """Memory-bound ops: elementwise ops, casts, norms, softmax and sums."""
    rows = (256, 1024, 4096, 16384, 65536) if not quick else (1024, 16384)
    widths = (1024, 4096, 12288) if not quick else (4096,)
    for dtype in (torch.bfloat16, torch.float32):
        for width in widths:
            for count in rows:
                for name, make, tensors in _row_ops(count, width, dtype):
                    yield CalibrationCase(
                        f"{name} {count} x {width} {dtype}", make, tensors * count * width * dtype.itemsize
                    )


def _row_ops(rows: int, width: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], OpCall], int]]:
    def new() -> torch.Tensor:
        return _new(rows, width, dtype=dtype)

    def vector() -> torch.Tensor:
        return _new(width, dtype=dtype)

    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    yield "add", lambda: OpCall(aten.add.Tensor, (new(), new())), 3
    yield "gelu", lambda: OpCall(aten.gelu.default, (new(),)), 2
    yield "add a row", lambda: OpCall(aten.add.Tensor, (new(), vector())), 2
    yield "fill", lambda: OpCall(aten.fill_.Scalar, (new(), 0.0)), 1
    yield "cast", lambda: OpCall(aten.copy_.default, (_new(rows, width, dtype=other), new())), 3
    yield "layer norm", lambda: OpCall(aten.native_layer_norm.default, (new(), [width], vector(), vector(), 1e-5)), 2
    yield "softmax", lambda: OpCall(aten._softmax.default, (new(), -1, False)), 2
    yield "log softmax backward", lambda: OpCall(aten._log_softmax_backward_data.default, (new(), new(), -1, dtype)), 3
    yield "sum of rows", lambda: OpCall(aten.sum.dim_IntList, (new(), [-1])), 1


def copies(quick: bool) -> Iterator[CalibrationCase]:
    """Copies between pinned host memory and the GPU, and within the GPU."""
    for nbytes in (64 * 1024, MIB, 8 * MIB, 64 * MIB, 256 * MIB) if not quick else (MIB, 64 * MIB):
        for direction in ("h2d", "d2h", "d2d"):
            yield CalibrationCase(f"copy {direction} {nbytes} bytes", _copy(direction, nbytes), 2 * nbytes)


def _copy(direction: str, nbytes: int) -> Callable[[], OpCall]:
    def make() -> OpCall:
        def place(device: str) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=device == "cpu")

        source, to = ("cpu", "cuda") if direction == "h2d" else ("cuda", "cpu" if direction == "d2h" else "cuda")
        return OpCall(aten.copy_.default, (place(to), place(source), True))

    return make
