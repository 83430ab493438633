"""A call as rules see it, the work a rule says it is, and the table rules register in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maya_core.device.kernels.triton import TritonKernel

ITEM_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
    "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16, "UInt16": 2, "UInt32": 4, "UInt64": 8,
}  # fmt: skip  # every 8-bit float is one byte, which is the default
HALVES = ("Half", "BFloat16")


class Tensor(NamedTuple):
    """A tensor's metadata as the native device describes it."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: str

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES.get(self.dtype, 1)

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

    def permuted(self, *dims: int) -> Tensor:
        return self._replace(sizes=tuple(self.sizes[d] for d in dims), strides=tuple(self.strides[d] for d in dims))


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
        return Tensor(
            dtype, sizes, strides, "cuda" if device == "meta" else device
        )  # results are described before they exist
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
class Call:
    """One kind of call: an op with the metadata of its arguments and of what comes out."""

    op: str
    names: list[str]
    arguments: list[Any]
    outputs: list[Any]
    sms: int
    threads_per_sm: int
    capability: int  # 90 for sm_90

    @property
    def name(self) -> str:
        """The op without namespace and overload."""
        return self.op.split("::")[-1].split(".")[0]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments[self.names.index(name)] if name in self.names else default

    def __getitem__(self, name: str) -> Any:
        return self.arguments[self.names.index(name)]

    @property
    def inputs(self) -> list[Tensor]:
        """Every tensor given, but for those given to be written (`out=`)."""
        named = itertools.zip_longest(self.names, self.arguments)
        return [tensor for name, argument in named if name != "out" for tensor in tensors_in(argument)]

    @property
    def results(self) -> list[Tensor]:
        return [tensor for output in self.outputs for tensor in tensors_in(output)]


@dataclass(frozen=True)
class Signature:
    """A distinct call as the trace keeps it: the op, the metadata of its arguments and results, and what it costs."""

    op: str
    names: list[str]  # of the arguments
    arguments: list[Any]
    outputs: list[Any]
    launches: int
    flops: int
    kernel: TritonKernel | None = None  # the one it launches, where that was written in Triton


OUTPUT, TEMPORARY, FREE, BLAS_WORKSPACE, HOST_OUTPUT, STORAGE = range(6)  # as Plan::Step in dispatch.h


@dataclass
class Work:
    """What a call does: kernels launched, and its allocations in the order the kernel makes them.

    Outputs not named in the program are made after it; temporaries not freed in it live until the op ends.
    """

    launches: int = 1
    program: list[tuple[int, int]] = field(default_factory=list)
    _temporaries: int = 0

    def out(self, *indices: int) -> Work:
        self.program += [(OUTPUT, index) for index in indices]
        return self

    def host_out(self, *indices: int) -> Work:
        """Outputs that the op makes in host memory."""
        self.program += [(HOST_OUTPUT, index) for index in indices]
        return self

    def storage(self, nbytes: int) -> Work:
        """The next output lies in an allocation of this size, whatever its own."""
        self.program.append((STORAGE, nbytes))
        return self

    def temporary(self, nbytes: int) -> int:
        self.program.append((TEMPORARY, nbytes))
        self._temporaries += 1
        return self._temporaries - 1

    @property
    def last_temporary(self) -> int:
        return self._temporaries - 1

    def free(self, *temporaries: int) -> Work:
        self.program += [(FREE, index) for index in temporaries]
        return self

    def blas(self) -> Work:
        self.program.append((BLAS_WORKSPACE, 0))
        return self


Rule = Callable[[Call], Work]
RULES: dict[str, Rule] = {}


def kernel(*names: str) -> Callable[[Rule], Rule]:
    """Registers what ops do, by their name without namespace and overload."""

    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return register
