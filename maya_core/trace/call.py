"""A call of an op as the trace stores it: tensors by their metadata, everything else by value.

A call says what the program requested, not which kernels the GPU launched for it: maya_core/ops plans those for each GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from maya_core.hardware.dtypes import item_bytes
from maya_core.trace.triton_kernel import TritonKernel


class Tensor(NamedTuple):
    """A tensor's metadata, as the native device describes it."""

    dtype: str  # as c10 names it: Float, BFloat16, Long
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: str

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def itemsize(self) -> int:
        return item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        if self.numel == 0:
            return True
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def is_dense(self) -> bool:
        """Non-overlapping and dense: a permutation of a contiguous tensor."""
        if self.numel == 0:
            return True
        expected = 1
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def is_channels_last(self) -> bool:
        """Whether an image has its channels packed innermost, and not only because all its other sizes are 1."""
        return len(self.sizes) >= 4 and self.is_dense and self.strides[1] == 1 and not self.is_contiguous

    def permuted(self, *dims: int) -> Tensor:
        return self._replace(sizes=tuple(self.sizes[d] for d in dims), strides=tuple(self.strides[d] for d in dims))

    def packed(self) -> Tensor:
        """This tensor with contiguous strides."""
        return self._replace(strides=packed(self.sizes))


def packed(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def as_tensors(value: Any) -> Any:
    """Turns the plain tuples of the native device into `Tensor`s, at any depth of lists."""
    if isinstance(value, tuple):
        dtype, sizes, strides, device = value
        return Tensor(dtype, sizes, strides, "cuda" if device == "meta" else device)  # results are not allocated yet
    if isinstance(value, list):
        return [as_tensors(item) for item in value]
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from tensors_in(item)


@dataclass(frozen=True)
class TorchSettings:
    """The switches of torch that decide which kernel runs, as the native device read them when the call was made."""

    tf32_products: bool = False  # torch.backends.cuda.matmul.allow_tf32 and equivalents
    tf32_cudnn: bool = True  # torch.backends.cudnn.allow_tf32
    half_reductions: bool = True  # float16 products may be accumulated in float16
    bfloat_reductions: bool = True
    cudnn: bool = True
    benchmark: bool = False  # torch.backends.cudnn.benchmark
    deterministic: bool = False  # torch.use_deterministic_algorithms
    cudnn_deterministic: bool = False
    # Where torch prefers cuDNN's attention, it is tried first (TORCH_CUDNN_SDPA_DEPRIORITIZED).
    sdpa_cudnn_first: bool = True
    sdpa_flash: bool = True
    sdpa_efficient: bool = True
    sdpa_cudnn: bool = True
    sdpa_math: bool = True

    @staticmethod
    def from_bits(bits: int, names: list[str]) -> TorchSettings:
        """Reads the switches from the bits of a number; the native device gives the `names` of the bits."""
        return TorchSettings(**{name: bool(bits >> place & 1) for place, name in enumerate(names)})

    def as_json(self) -> dict[str, bool]:
        """The switches that differ from torch's defaults."""
        return {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not field.default
        }


DEFAULT_SETTINGS = TorchSettings()


@dataclass(frozen=True)
class Call:
    """A distinct call: an op by its full name, with the metadata of its arguments and results."""

    op: str  # namespace::name, with .overload where it has one
    names: list[str]  # of the arguments
    arguments: list[Any]
    outputs: list[Any]
    settings: TorchSettings = DEFAULT_SETTINGS
    triton: TritonKernel | None = None  # the kernel that it launches, if that is written in Triton
    # For an op that the program describes itself: its planned kernels and its floating-point operations.
    kernels: list[dict[str, Any]] = field(default_factory=list)
    flops: int = 0

    @cached_property
    def name(self) -> str:
        """The op without its overload: `aten::mm`."""
        return self.op.partition(".")[0]

    @cached_property
    def overload(self) -> str:
        return self.op.partition(".")[2]

    @cached_property
    def named(self) -> dict[str, Any]:
        return dict(zip(self.names, self.arguments, strict=False))

    def get(self, name: str, default: Any = None) -> Any:
        return self.named.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def tensor(self, reference: str) -> Tensor | None:
        """An argument by its name, or a result by its number; None if the call has no such tensor."""
        if reference.isdigit():
            place = int(reference)
            return self.results[place] if place < len(self.results) else None
        value = self.named.get(reference)
        return value if isinstance(value, Tensor) else None

    @cached_property
    def inputs(self) -> list[Tensor]:
        """Every tensor among the arguments, except those that are only written (`out=`)."""
        named = itertools.zip_longest(self.names, self.arguments)
        return [tensor for name, argument in named if name != "out" for tensor in tensors_in(argument)]

    @cached_property
    def results(self) -> list[Tensor]:
        return [tensor for output in self.outputs for tensor in tensors_in(output)]
