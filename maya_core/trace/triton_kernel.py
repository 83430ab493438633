"""A kernel written in Triton, by torch.compile or by the user, as the trace stores it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

NAMESPACE = "triton::"  # of the calls that launch such kernels


@dataclass(frozen=True)
class TritonKernel:
    """One kernel with one tile configuration. Sizes are those for which it was generated; a launch has its own in its arguments."""

    name: str
    kind: str  # inductor's heuristic: pointwise, reduction, persistent_reduction, template, user, ...
    nbytes: int | None = (
        None  # read and written, by inductor's count; None: unknown, each argument is read or written once
    )
    flops: int = 0
    loads: int = 0
    stores: int = 0
    reductions: int = 0
    hint: str = ""  # of a reduction: INNER along the contiguous dimension, OUTER across it
    numels: dict[str, int] = field(default_factory=dict)  # x, y, z, r0_, r1_
    atomic: bool = False
    rereads: int = 0  # how many loops after the first read its rows again
    config: dict[str, Any] = field(default_factory=dict)  # XBLOCK, R0_BLOCK, BLOCK_M, ...
    warps: int = 0
    stages: int = 0
    configs: int = 1  # that inductor could choose from
    ops: list[str] = field(default_factory=list)  # fused in it
    lines: list[str] = field(default_factory=list)  # lines of the program that call these ops, file:line
    template: dict[str, Any] = field(default_factory=dict)  # the kind and sizes of a template's product or attention

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, 0, "", False, {}, [])}

    @staticmethod
    def from_json(row: dict[str, Any]) -> TritonKernel:
        return TritonKernel(**row)
