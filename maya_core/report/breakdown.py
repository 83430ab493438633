"""Breaks the time of a step down: into compute, exposed communication, waiting, copies and host; by family, module and call."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from maya_core.hardware.dtypes import item_bytes
from maya_core.ops.kernel import Unknown
from maya_core.predictor.collective_time import buffer_bytes
from maya_core.predictor.durations import Provenance
from maya_core.predictor.families import COMMUNICATION
from maya_core.report.analysis import Analysis, Window
from maya_core.report.kernel_table import entries
from maya_core.report.prediction import Communication, Confidence, Module, RankTime, TopKernel, UnknownOp
from maya_core.simulator.clock import WorkKind
from maya_core.simulator.host import seconds_alone
from maya_core.simulator.simulate import RankTimeline
from maya_core.trace.call_names import elements, generic
from maya_core.trace.communication import CollectiveCall
from maya_core.trace.schema import EventKind, Phase

# What a moment counts as: the first one that applies.
COMPUTING, MOVING, WAITING, COPYING = range(4)


@dataclass(frozen=True)
class Spans:
    """Intervals of time of one kind."""

    start: np.ndarray
    end: np.ndarray

    def within(self, window: Window) -> Spans:
        start, end = np.maximum(self.start, window.start), np.minimum(self.end, window.end)
        some = end > start
        return Spans(start[some], end[some])


def spans_of(rank: RankTimeline) -> list[Spans]:
    """The rank's intervals by kind: COMPUTING, MOVING, WAITING, COPYING."""
    compute = rank.kind == WorkKind.COMPUTE
    meet = rank.kind == WorkKind.MEET
    copies = (rank.kind == WorkKind.COPY_IN) | (rank.kind == WorkKind.COPY_OUT)
    return [
        Spans(rank.began[compute], rank.over[compute]),
        Spans(rank.met[meet], rank.over[meet]),
        Spans(rank.began[meet], rank.met[meet]),
        Spans(rank.met[copies], rank.over[copies]),
    ]


def split(spans: list[Spans], window: Window) -> tuple[np.ndarray, float]:
    """The seconds that count as each kind, and the seconds in which any data moves."""
    inside = [one.within(window) for one in spans]
    times = np.concatenate([part for one in inside for part in (one.start, one.end)])
    changes = np.concatenate([part for one in inside for part in (np.ones(len(one.start)), -np.ones(len(one.end)))])
    kinds = np.concatenate([np.full(2 * len(one.start), kind) for kind, one in enumerate(inside)])
    order = np.argsort(times, kind="stable")
    lengths = np.diff(times[order], append=window.end)
    active = np.stack(
        [np.cumsum(np.where(kinds[order] == kind, changes[order], 0)) > 0.5 for kind in range(len(spans))]
    )
    first = np.where(active.any(axis=0), active.argmax(axis=0), len(spans))
    return np.bincount(first, lengths, len(spans) + 1)[: len(spans)], float(lengths[active[MOVING]].sum())


def rank_time(analysis: Analysis, rank: RankTimeline) -> RankTime | None:
    window = analysis.window(rank)
    if window is None or window.end <= window.start:
        return None
    by_kind, moving = split(spans_of(rank), window)
    compute, exposed, waiting, copying = (by_kind / window.steps).tolist()
    moving /= window.steps
    return RankTime(
        rank=rank.rank,
        step_time_s=window.step_s,
        compute_s=compute,
        exposed_communication_s=exposed,
        waiting_s=waiting,
        copy_s=copying,
        host_s=max(0.0, window.step_s - compute - exposed - waiting - copying),
        communication_s=moving,
        hidden_communication_s=moving - exposed,
        slowed_s=_slowed(analysis, rank, window),
        by_family_s=by_family(analysis, rank.rank),
    )


def _slowed(analysis: Analysis, rank: RankTimeline, window: Window) -> float:
    """The compute time that is lost because communication runs at the same time."""
    trace, priced = analysis.job.ranks[rank.rank], analysis.durations[rank.rank]
    if not (rank.kind == WorkKind.MEET).any():  # kernels on several streams slow each other down, which is not a loss
        return 0.0
    those = (rank.kind == WorkKind.COMPUTE) & (rank.over > window.start) & (rank.began < window.end)
    alone = seconds_alone(priced)[trace.events["subject"][rank.event[those]]]
    return max(0.0, float((rank.over[those] - rank.began[those] - alone).sum())) / window.steps


def by_family(analysis: Analysis, rank: int) -> dict[str, float]:
    trace, priced = analysis.job.ranks[rank], analysis.durations[rank]
    where, steps = analysis.steady_events(rank)
    events = trace.events[where]
    totals: dict[str, float] = defaultdict(float)
    ops = np.bincount(events["subject"][events["kind"] == EventKind.OP], minlength=len(trace.calls))
    for family, seconds, count in zip(priced.families, priced.ops.seconds.tolist(), ops.tolist(), strict=False):
        totals[family] += seconds * count / steps
    calls = np.bincount(events["subject"][events["kind"] == EventKind.COLLECTIVE], minlength=len(trace.collectives))
    if calls.any():
        totals[COMMUNICATION] = float((priced.collectives.seconds * calls).sum()) / steps
    return dict(sorted(((name, total) for name, total in totals.items() if total > 0), key=lambda pair: -pair[1]))


def confidence(analysis: Analysis) -> Confidence | None:
    """The shares of GPU time of all emulated ranks, by provenance and profile."""
    shares = np.zeros(len(Provenance))
    profiles: dict[str, float] = defaultdict(float)
    for rank, trace in analysis.job.ranks.items():
        events = trace.events[analysis.steady_events(rank)[0]]
        priced = analysis.durations[rank]
        for kind, known in ((EventKind.OP, priced.ops), (EventKind.COLLECTIVE, priced.collectives)):
            subjects = events["subject"][events["kind"] == kind]
            if not len(subjects):
                continue
            seconds = known.seconds * np.bincount(subjects, minlength=len(known.seconds))
            shares += np.bincount(known.provenance, seconds, len(Provenance))
            for number, total in enumerate(np.bincount(known.profile, seconds, len(known.profiles)).tolist()):
                profiles[known.profiles[number]] += total
    total = shares.sum()
    if not total:
        return None
    return Confidence(
        **{each.name.lower(): float(shares[each] / total) for each in Provenance},
        profiles={
            name: seconds / total for name, seconds in sorted(profiles.items(), key=lambda pair: -pair[1]) if seconds
        },
    )


def unknown_ops(analysis: Analysis, rank: int) -> list[UnknownOp]:
    """The ops of a steady step that have no description."""
    trace, priced = analysis.job.ranks[rank], analysis.durations[rank]
    where, steps = analysis.steady_events(rank) if analysis.steps else (slice(None), 1)
    events = trace.events[where]
    times = np.bincount(events["subject"][events["kind"] == EventKind.OP], minlength=len(trace.calls)) / steps
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number in np.flatnonzero(times).tolist():
        if any(isinstance(kernel, Unknown) for kernel in priced.kernels[number]):
            found[priced.calls[number].name][0] += times[number]
            found[priced.calls[number].name][1] += times[number] * float(priced.ops.seconds[number])
    rows = [UnknownOp(name=name, calls=round(calls), seconds=seconds) for name, (calls, seconds) in found.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.name))


def top_kernels(analysis: Analysis, rank: int, most: int = 20) -> list[TopKernel]:
    return [
        TopKernel(
            name=entry.name,
            shapes=entry.shapes,
            family=entry.family,
            calls=entry.times,
            seconds=entry.total,
            provenance=entry.provenance.name.lower(),
            profile=entry.profile,
        )
        for entry in entries(analysis.job.ranks[rank], analysis.durations[rank])[:most]
    ]


def top_modules(analysis: Analysis, rank: int, most: int = 20) -> list[Module]:
    """Modules by the time of their own ops, without their submodules. Repeated layers are combined."""
    trace, priced = analysis.job.ranks[rank], analysis.durations[rank]
    where, steps = analysis.steady_events(rank)
    events = trace.events[where]
    columns = len(Phase) + 1
    table = np.zeros((len(trace.modules), columns))
    counts = np.zeros(len(trace.modules))
    for kind, seconds in ((EventKind.OP, priced.ops.seconds), (EventKind.COLLECTIVE, priced.collectives.seconds)):
        those = events[events["kind"] == kind]
        if not len(those):
            continue
        column = those["phase"] if kind == EventKind.OP else np.full(len(those), len(Phase))
        np.add.at(table, (those["module"], column), seconds[those["subject"]] / steps)
        np.add.at(counts, those["module"], 1 / steps)
    found: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(columns + 1))
    for name, row, count in zip(trace.modules, table, counts, strict=True):
        found[generic(name)] += [*row, count]
    rows = [
        Module(
            name=name or "(outside any module)",
            forward_s=float(row[Phase.FORWARD]),
            backward_s=float(row[Phase.BACKWARD] + row[Phase.RECOMPUTE]),
            optimizer_s=float(row[Phase.OPTIMIZER]),
            recompute_s=float(row[Phase.RECOMPUTE]),
            communication_s=float(row[len(Phase)]),
            calls=round(row[-1]),
        )
        for name, row in found.items()
        if row[:-1].any()
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:most]


def communication(analysis: Analysis, rank: int) -> list[Communication]:
    trace, priced = analysis.job.ranks[rank], analysis.durations[rank]
    where, steps = analysis.steady_events(rank)
    events = trace.events[where]
    rows: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    chosen = events["subject"][events["kind"] == EventKind.COLLECTIVE]
    for subject, times in zip(*np.unique(chosen, return_counts=True), strict=True):
        call = trace.collectives[int(subject)]
        row = rows[call.communicator, call.op]
        row[0] += times / steps
        row[1] += times / steps * _bytes(call)
        row[2] += times / steps * float(priced.collectives.seconds[subject])
        row[3] += times / steps * buffer_bytes(call, trace.communicators[call.communicator], analysis.cluster)
    found = []
    for (number, op), (times, nbytes, seconds, whole) in rows.items():
        group = trace.communicators[number]
        found.append(
            Communication(
                group=group.name,
                backend=group.backend,
                group_size=len(group.ranks),
                op=op,
                calls=round(times),
                bytes=round(nbytes),
                seconds=seconds,
                bytes_per_s=whole / seconds if seconds else None,
            )
        )
    return sorted(found, key=lambda row: -row.seconds)


def _bytes(call: CollectiveCall) -> int:
    return elements(call) * item_bytes(call.dtype)
