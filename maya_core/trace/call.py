"""A call of an op as the trace keeps it: tensors by their metadata, everything else by value. It says what the program asked
of its GPU, not what the GPU did for it: that is planned anew for each GPU (`maya_core/ops`)."""

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
    """A tensor's metadata as the native device describes it."""

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
        """Of images: channels move fastest, and not because everything else is a single element."""
        return len(self.sizes) >= 4 and self.is_dense and self.strides[1] == 1 and not self.is_contiguous

    def permuted(self, *dims: int) -> Tensor:
        return self._replace(sizes=tuple(self.sizes[d] for d in dims), strides=tuple(self.strides[d] for d in dims))

    def packed(self) -> Tensor:
        """The same, contiguous."""
        return self._replace(strides=packed(self.sizes))


def packed(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def as_tensors(value: Any) -> Any:
    """The native device's plain tuples turned into `Tensor`s, at any depth of lists."""
    if isinstance(value, tuple):
        dtype, sizes, strides, device = value
        return Tensor(dtype, sizes, strides, "cuda" if device == "meta" else device)  # results are not made yet
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
    """Switches of torch that decide which kernel runs, as they stood when the call was made. The native device reads them."""

    tf32_products: bool = False  # torch.backends.cuda.matmul.allow_tf32 and its like
    tf32_cudnn: bool = True  # torch.backends.cudnn.allow_tf32
    half_reductions: bool = True  # float16 products may be summed up in float16
    bfloat_reductions: bool = True
    cudnn: bool = True
    benchmark: bool = False  # torch.backends.cudnn.benchmark
    deterministic: bool = False  # torch.use_deterministic_algorithms
    cudnn_deterministic: bool = False
    sdpa_cudnn_first: bool = (
        True  # where torch prefers cuDNN's attention, it is tried first (TORCH_CUDNN_SDPA_DEPRIORITIZED)
    )
    sdpa_flash: bool = True
    sdpa_efficient: bool = True
    sdpa_cudnn: bool = True
    sdpa_math: bool = True

    @staticmethod
    def from_bits(bits: int, names: list[str]) -> TorchSettings:
        """Switches by their place in a number, in the order the native device says."""
        return TorchSettings(**{name: bool(bits >> place & 1) for place, name in enumerate(names)})

    def as_json(self) -> dict[str, bool]:
        """What is not as torch starts with."""
        return {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not field.default
        }


DEFAULT_SETTINGS = TorchSettings()


@dataclass(frozen=True)
class Call:
    """One kind of call: an op by its full name, with the metadata of its arguments and of what comes out."""

    op: str  # namespace::name, with .overload where it has one
    names: list[str]  # of the arguments
    arguments: list[Any]
    outputs: list[Any]
    settings: TorchSettings = DEFAULT_SETTINGS
    triton: TritonKernel | None = None  # the kernel it is a launch of, where that was written in Triton
    # Of an op that is not Maya's, what its author says: the kernels as planned, and floating-point operations.
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
        """An argument by name, or a result by number; None if there is none, or none was given."""
        if reference.isdigit():
            place = int(reference)
            return self.results[place] if place < len(self.results) else None
        value = self.named.get(reference)
        return value if isinstance(value, Tensor) else None

    @cached_property
    def inputs(self) -> list[Tensor]:
        """Every tensor given, but for those given to be written (`out=`)."""
        named = itertools.zip_longest(self.names, self.arguments)
        return [tensor for name, argument in named if name != "out" for tensor in tensors_in(argument)]

    @cached_property
    def results(self) -> list[Tensor]:
        return [tensor for output in self.outputs for tensor in tensors_in(output)]
