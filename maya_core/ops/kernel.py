"""The kernels that ops launch. Their fields are what decides the duration of each, including the library that the kernel belongs to.

A kernel's family names the predictor class that prices it (`maya_core/predictor`). `model` distinguishes the measurements within a family,
and `sizes` are the kernel's numbers in the order of the fields. Calibrations on disk store a kernel as these three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

TN, NN, NT, TT = range(4)  # layouts of a product: x @ W.t(), grad @ W, grad.t() @ x, and both operands transposed
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)  # directions of a convolution


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of a kernel."""

    family: ClassVar[str]
    named: ClassVar[tuple[str, ...]] = ()  # the fields that make up `model`

    @property
    def model(self) -> str:
        return str(getattr(self, self.named[0])) if self.named else ""

    @property
    def sizes(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in number_fields(type(self)))

    @classmethod
    def of(cls, model: str, sizes: Sequence[float]) -> Kernel:
        """The kernel with this model and these numbers."""
        words = {name: model for name in cls.named}  # one or none; a class with two overrides this
        return cls(**words, **dict(zip(number_fields(cls), sizes, strict=True)))


_NUMBERS: dict[str, tuple[str, ...]] = {}  # by family


def number_fields(kind: type[Kernel]) -> tuple[str, ...]:
    if kind.family not in _NUMBERS:
        _NUMBERS[kind.family] = tuple(field.name for field in fields(kind) if field.name not in kind.named)
    return _NUMBERS[kind.family]


@dataclass(frozen=True, slots=True)
class Gemm(Kernel):
    """cuBLAS's product C[m,n] = A[m,k] @ B[k,n], `batch` times."""

    family: ClassVar[str] = "gemm"
    named: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: str
    batch: float
    m: float
    n: float
    k: float
    layout: int = TN


@dataclass(frozen=True, slots=True)
class GroupedGemm(Kernel):
    """CUTLASS's grouped product: `m` is the number of rows of all groups together, `n` and `k` are those of one group."""

    family: ClassVar[str] = "grouped_gemm"
    named: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: str
    groups: float
    m: float
    n: float
    k: float
    layout: int = TN


@dataclass(frozen=True, slots=True)
class Attention(Kernel):
    """Fused attention. `backend` is the library of the kernel: flash (FlashAttention-2), efficient (CUTLASS) or cudnn."""

    family: ClassVar[str] = "attention"
    named: ClassVar[tuple[str, ...]] = ("backend", "direction")

    backend: str
    direction: str  # forward, backward
    batch: float
    heads: float
    kv_heads: float
    queries: float
    keys: float
    head: float
    value_head: float
    causal: int = 0
    window: float = 0  # keys to its left that a query attends to; 0: all
    item_bytes: int = 2

    @property
    def model(self) -> str:
        return f"{self.backend}_{self.direction}"

    @classmethod
    def of(cls, model: str, sizes: Sequence[float]) -> Kernel:
        backend, direction = model.split("_")
        return cls(backend, direction, **dict(zip(number_fields(cls), sizes, strict=True)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Convolution(Kernel):
    """cuDNN's convolution, or ATen's own depthwise one."""

    family: ClassVar[str] = "convolution"
    named: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: str
    direction: int  # FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
    batch: float
    channels_in: float
    channels_out: float
    groups: float
    pixels_in: float
    pixels_out: float
    volume: float  # of the filter
    channels_last: int = 0
    stride: float = 1  # product over dimensions


@dataclass(frozen=True, slots=True)
class Recurrent(Kernel):
    """All recurrent layers of one cuDNN call."""

    family: ClassVar[str] = "recurrent"
    named: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: str
    backward: int
    gates: float
    layers: float
    directions: float
    steps: float
    batch: float
    given: float  # width of the input
    hidden: float
    item_bytes: float


@dataclass(frozen=True, slots=True)
class Streaming(Kernel):
    """A kernel of ATen that moves bytes in a pattern: elementwise, strided, reduction, norm ... (predictor/streaming_time.py lists them)."""

    family: ClassVar[str] = "memory"
    named: ClassVar[tuple[str, ...]] = ("pattern",)

    pattern: str
    read: float  # bytes
    written: float
    elements: float
    row: float = 0  # elements of a row that is processed as a unit; 0: there are no rows

    def part(self, parts: float) -> Streaming:
        """One of `parts` equal parts."""
        return Streaming(self.pattern, self.read / parts, self.written / parts, self.elements / parts, self.row)


@dataclass(frozen=True, slots=True)
class Generated(Kernel):
    """A kernel written in Triton, by inductor or by hand, that moves bytes in a pattern."""

    family: ClassVar[str] = "triton"
    named: ClassVar[tuple[str, ...]] = ("pattern",)

    pattern: str
    read: float
    written: float
    elements: float
    row: float = 0
    rereads: float = 0  # how often rows are read again


@dataclass(frozen=True, slots=True)
class TritonGemm(Kernel):
    """A product from inductor's template."""

    family: ClassVar[str] = "triton_gemm"
    named: ClassVar[tuple[str, ...]] = ("dtype",)

    dtype: str
    batch: float
    m: float
    n: float
    k: float
    layout: int
    tile_m: float
    tile_n: float
    tile_k: float
    warps: float
    stages: float
    traffic: float  # bytes, including those of fused ops


@dataclass(frozen=True, slots=True)
class TritonAttention(Attention):
    """flex_attention's template. `share` is the share of blocks that the mask keeps."""

    family: ClassVar[str] = "triton_attention"

    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Copy(Kernel):
    """A memcpy: h2d, d2h or d2d."""

    family: ClassVar[str] = "copy"
    named: ClassVar[tuple[str, ...]] = ("direction",)

    direction: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Included(Kernel):
    """A launch whose duration is included in another kernel of the same call, because they were measured together."""

    family: ClassVar[str] = "included"


@dataclass(frozen=True, slots=True)
class Unknown(Kernel):
    """The kernels of an op that was not measured. It moves its bytes and computes at the GPU's peak, which is a lower bound."""

    family: ClassVar[str] = "unknown"
    named: ClassVar[tuple[str, ...]] = ("op",)

    op: str
    read: float
    written: float
    elements: float
    flops: float = 0  # where the arithmetic is known
    double: int = 0  # whether it is in double precision


@dataclass(frozen=True, slots=True)
class Timed(Kernel):
    """A kernel whose duration its author gives."""

    family: ClassVar[str] = "timed"
    named: ClassVar[tuple[str, ...]] = ("label",)

    label: str
    seconds: float


KERNELS: dict[str, type[Kernel]] = {
    kind.family: kind
    for kind in (
        Gemm, GroupedGemm, Attention, Convolution, Recurrent, Streaming, Generated, TritonGemm, TritonAttention, Copy,
        Included, Unknown, Timed,
    )
}  # fmt: skip

INCLUDED = Included()


def small(nbytes: float = 4) -> Streaming:
    """A launch that handles a few numbers: it zeroes semaphores, initializes a scan, or sums in one block."""
    return Streaming("fill", 0, nbytes, max(nbytes / 4, 1))


class Columns:
    """The fields of many kernels of one class as arrays: `columns.m` has the m of every kernel."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self._kernels = list(kernels)

    @staticmethod
    def of_rows(kind: type[Kernel], rows: np.ndarray[Any, np.dtype[np.float64]]) -> Columns:
        """Columns of a table with a row for each kernel and the columns in the order of `Kernel.sizes`."""
        columns = Columns(())
        columns.__dict__.update(zip(number_fields(kind), np.atleast_2d(np.asarray(rows, float)).T, strict=True))
        return columns

    def __getattr__(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        if not self._kernels:
            raise AttributeError(name)
        values = np.array([getattr(kernel, name) for kernel in self._kernels], np.float64)
        self.__dict__[name] = values
        return values


def to_json(kernel: Kernel) -> dict[str, Any]:
    return {"family": kernel.family, **asdict(kernel)}


def from_json(row: dict[str, Any]) -> Kernel:
    return KERNELS[row["family"]](**{name: value for name, value in row.items() if name != "family"})
