"""What each call launches on the device: kernels, copies, temporaries, and a lower bound of its time.

The native device asks `Planner.plan` once per distinct call (op and metadata of its arguments) and keeps the answer,
so nothing here is on the hot path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maya_core.hardware.catalog import Gpu

ITEM_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8,
    "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip


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


@dataclass
class Call:
    """One kind of call: an op with the metadata of its arguments and of what comes out."""

    op: str
    names: list[str]
    arguments: list[Any]
    outputs: list[Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[self.names.index(name)]


@dataclass
class Signature:
    """A call as the trace keeps it."""

    op: str
    arguments: list[Any]
    outputs: list[Any]
    launches: int = 1


def as_tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return Tensor(*value)
    if isinstance(value, list):
        return [as_tensors(item) for item in value]
    return value


@dataclass
class Planner:
    gpu: Gpu
    signatures: list[Signature] = field(default_factory=list)

    def plan(self, op: str, names: list[str], arguments: list[Any], outputs: list[Any]) -> tuple[int, float, list[tuple[int, int]] | None]:
        call = Call(op, names, [as_tensors(a) for a in arguments], [as_tensors(o) for o in outputs])
        self.signatures.append(Signature(call.op, call.arguments, call.outputs))
        program = None
        if op.removeprefix("aten::").split(".")[0] in ("mm", "addmm", "bmm", "baddbmm"):
            program = [(0, 0), (3, 0)]
        return len(self.signatures) - 1, 0.0, program
