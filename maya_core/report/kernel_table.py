"""The table of `maya kernels`: the ops and collectives of a rank's last step, longest first, with the provenance of their times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.families import COMMUNICATION
from maya_core.predictor.pricing import TraceDurations
from maya_core.report import wording
from maya_core.trace.call import Call, Tensor
from maya_core.trace.communication import CollectiveCall
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind


@dataclass(frozen=True)
class KernelRow:
    """A distinct call of a step."""

    name: str
    shapes: str
    family: str
    times: int
    seconds: float  # of one call
    provenance: Provenance
    profile: str

    @property
    def total(self) -> float:
        return self.times * self.seconds


def entries(trace: RankTrace, durations: TraceDurations) -> list[KernelRow]:
    """Every distinct op and collective of the last step, longest first."""
    step = trace.step(trace.steps) if trace.steps else trace.events

    def op(number: int) -> tuple[str, str, str]:
        return (*_op(durations.calls[number]), durations.families[number])

    def collective(number: int) -> tuple[str, str, str]:
        return (*_collective(trace.collectives[number]), COMMUNICATION)

    found = []
    for kind, priced, label in (
        (EventKind.OP, durations.ops, op),
        (EventKind.COLLECTIVE, durations.collectives, collective),
    ):
        numbers, counts = np.unique(step["subject"][step["kind"] == kind], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if priced.seconds[number] > 0:
                found.append(_entry(priced, number, count, *label(number)))
    return sorted(found, key=lambda entry: -entry.total)


def _entry(priced: Durations, number: int, count: int, name: str, shapes: str, family: str) -> KernelRow:
    known = Provenance(int(priced.provenance[number]))
    profile = priced.profiles[priced.profile[number]]
    return KernelRow(name, shapes, family, count, float(priced.seconds[number]), known, profile)


def _op(call: Call) -> tuple[str, str]:
    shapes = ["x".join(map(str, a.sizes)) for a in call.arguments if isinstance(a, Tensor) and a.sizes]
    lists = [f"{len(a)} tensors" for a in call.arguments if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    dtypes = dict.fromkeys(a.dtype for a in call.arguments if isinstance(a, Tensor) and a.sizes)
    parts = [*shapes[:3], *lists[:1], "/".join(list(dtypes)[:2])]
    return call.op.removeprefix("aten::"), ", ".join(part for part in parts if part)


def _collective(call: CollectiveCall) -> tuple[str, str]:
    return call.op, f"{max(call.elements_in, call.elements_out):,} {call.dtype}"


def shares(found: list[KernelRow]) -> dict[Provenance, float]:
    """The share of the time by provenance."""
    total = sum(entry.total for entry in found) or 1.0
    return {known: sum(e.total for e in found if e.provenance is known) / total for known in Provenance}


def render(rank: int, gpu: str, found: list[KernelRow], top: int) -> Group:
    total = sum(entry.total for entry in found)
    table = Table(
        title=f"rank {rank}, {gpu}: {total * 1e3:,.2f} ms of kernels, copies and collectives in the last step"
    )
    for heading, justify in (("op", "left"), ("inputs", "left"), ("calls", "right"), ("µs per call", "right"), ("share", "right"), ("source of the time", "left")):  # fmt: skip
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for entry in found[:top]:
        table.add_row(
            entry.name, entry.shapes, f"{entry.times:,}", f"{entry.seconds * 1e6:,.1f}", wording.share(entry.total / total),
            f"{entry.provenance.name.lower()}, {entry.profile}",
        )  # fmt: skip
    rest = found[top:]
    if rest:
        table.add_row(f"{len(rest)} more calls", "", f"{sum(e.times for e in rest):,}", "", wording.share(sum(e.total for e in rest) / total), "")  # fmt: skip
    known = ", ".join(
        f"{wording.percent(share)} {name.name.lower()}" for name, share in shares(found).items() if share > 0.0005
    )
    return Group(
        table,
        Text(
            f"How well times are known: {known}. The sums do not show which of these run at the same time.", style="dim"
        ),
    )
