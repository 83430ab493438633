"""A kernel written in Triton, by torch.compile or by the user, as the trace keeps it: what its author knows of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

NAMESPACE = "triton::"  # of such kernels' calls


@dataclass(frozen=True)
class TritonKernel:
    """One kernel with one tile configuration. Sizes are those it was generated for; a launch with other ones tells its own."""

    name: str
    kind: (
        str  # pointwise, reduction, persistent_reduction, template, user, ... : the heuristic that inductor gives it to
    )
    nbytes: int | None = (
        None  # read and written, as inductor counts them; None: not known, arguments are gone through once
    )
    flops: int = 0
    loads: int = 0
    stores: int = 0
    reductions: int = 0
    hint: str = ""  # of a reduction: INNER along what lies packed in memory, OUTER across it
    numels: dict[str, int] = field(default_factory=dict)  # x, y, z, r0_, r1_
    atomic: bool = False
    rereads: int = 0  # how often its rows are gone through again, in loops after the first
    config: dict[str, Any] = field(default_factory=dict)  # XBLOCK, R0_BLOCK, BLOCK_M, ...
    warps: int = 0
    stages: int = 0
    configs: int = 1  # that there were to choose from
    ops: list[str] = field(default_factory=list)  # fused in it
    lines: list[str] = field(default_factory=list)  # of the program that ask for them, file:line
    template: dict[str, Any] = field(default_factory=dict)  # what a product or attention of a template is of

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, 0, "", False, {}, [])}

    @staticmethod
    def from_json(row: dict[str, Any]) -> TritonKernel:
        return TritonKernel(**row)
