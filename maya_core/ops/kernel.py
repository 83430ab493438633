"""The kernels that ops launch: named fields for what decides how long each takes, among them whose kernel it is.

A kernel's family names the predictor class that prices it (`maya_core/predictor`). `model` is what measurements of a family
are told apart by, `sizes` are its numbers in the order of the fields: calibrations on disk keep a kernel as these three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

TN, NN, NT, TT = range(4)  # layouts of a product: of x @ W.t(), of grad @ W, of grad.t() @ x, and of neither contiguous
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)  # directions of a convolution


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch."""

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
        """The kernel of that model with these numbers."""
        words = {name: model for name in cls.named}  # one, or none; of two the class knows how they are joined
        return cls(**words, **dict(zip(number_fields(cls), sizes, strict=True)))


_NUMBERS: dict[str, tuple[str, ...]] = {}  # by family


def number_fields(kind: type[Kernel]) -> tuple[str, ...]:
    if kind.family not in _NUMBERS:
        _NUMBERS[kind.family] = tuple(field.name for field in fields(kind) if field.name not in kind.named)
    return _NUMBERS[kind.family]


@dataclass(frozen=True, slots=True)
class Gemm(Kernel):
    """C[m,n] = A[m,k] @ B[k,n], `batch` times over, by cuBLAS."""

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
    """CUTLASS's product of groups: `m` rows of all groups together, `n` and `k` of one."""

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
    """Fused attention: `backend` is whose kernel it is, flash (FlashAttention-2), efficient (CUTLASS) or cudnn."""

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
    window: float = 0  # keys that a query sees to its left; 0: all
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
    """cuDNN's recurrent layers, all of a call."""

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
    """ATen's kernel that moves bytes in a pattern: elementwise, strided, reduction, norm ... (predictor/memory.py names them)."""

    family: ClassVar[str] = "memory"
    named: ClassVar[tuple[str, ...]] = ("pattern",)

    pattern: str
    read: float  # bytes
    written: float
    elements: float
    row: float = 0  # elements of a row that is worked on as one; 0: none is

    def part(self, parts: float) -> Streaming:
        """One of so many equal parts."""
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
    traffic: float  # bytes, with those of what is fused


@dataclass(frozen=True, slots=True)
class TritonAttention(Attention):
    """flex_attention's template; `share` of the blocks is left by its mask."""

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
    """A launch whose time is part of another kernel of the same call, which was measured with it."""

    family: ClassVar[str] = "included"


@dataclass(frozen=True, slots=True)
class Unknown(Kernel):
    """A kernel of an op that nobody described: it moves its bytes, which is the least it can do."""

    family: ClassVar[str] = "unknown"
    named: ClassVar[tuple[str, ...]] = ("op",)

    op: str
    read: float
    written: float
    elements: float


@dataclass(frozen=True, slots=True)
class Timed(Kernel):
    """A kernel whose time its author gives."""

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
    """A launch that prepares a few numbers: semaphores zeroed, the state of a scan, one block that adds up."""
    return Streaming("fill", 0, nbytes, max(nbytes / 4, 1))


class Columns:
    """Fields of many kernels of one class as arrays: `columns.m` has every kernel's m."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self._kernels = list(kernels)

    @staticmethod
    def of_rows(kind: type[Kernel], rows: np.ndarray[Any, np.dtype[np.float64]]) -> Columns:
        """The same of a table with a row for each kernel, its columns in the order of `Kernel.sizes`."""
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
