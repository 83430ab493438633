"""The data of the timeline chart: what ran when on each stream in the last steady steps, packed for the page.

Times are whole ticks from an origin, as little-endian arrays in base64. A collective consists of two spans: waiting for other
ranks, and moving data. This module limits how much is embedded; `limits` describes what is not shown.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maya_core.predictor.durations import Provenance
from maya_core.predictor.families import COMMUNICATION, FAMILIES, title
from maya_core.report.analysis import Analysis
from maya_core.simulator.clock import WorkKind
from maya_core.simulator.simulate import RankTimeline
from maya_core.trace.call import Call, Tensor, tensors_in
from maya_core.trace.call_names import abbreviated, call_in_words, communicator_in_words
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind

MOST_RANKS = 8
MOST_SPANS = 100_000
STEPS = 2
WAITS = 8  # a flag in the `how` of a span, next to its phase
SYNCS = {
    WorkKind.HOST_EVENT: "waits for an event",
    WorkKind.HOST_LANE: "waits for a stream",
    WorkKind.HOST_DEVICE: "waits for the GPU",
    WorkKind.HOST_MEET: "waits for a collective on host data",
}
_TICKS = 2**32 - 1


def packed(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in np.linspace(0, len(items) - 1, most).round().astype(int)]


@dataclass
class _Names:
    """Assigns a number to each distinct name."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, name: Any) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


@dataclass(frozen=True)
class _Spans:
    """The work of a rank on its GPUs in the shown window."""

    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    issued: np.ndarray
    event: np.ndarray
    waits: np.ndarray

    def __len__(self) -> int:
        return len(self.lane)

    def longest(self, most: int) -> _Spans:
        kept = np.sort(np.argsort(self.start - self.end, kind="stable")[:most])
        return _Spans(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))


def timeline(analysis: Analysis) -> dict[str, Any] | None:
    """The data of the chart; None if no step was completed."""
    played = analysis.timeline
    if played is None or not analysis.steps:
        return None
    ends = played.step_ends[: analysis.steps]
    starts = np.concatenate([[0.0], ends[:-1]])
    steady = max(1, analysis.steps - 1)
    ranks = spread(list(played.ranks), MOST_RANKS)
    limits = []
    if len(ranks) < len(played.ranks):
        limits.append(f"{len(ranks)} of {len(played.ranks)} emulated ranks are shown")
    for steps in range(min(STEPS, steady), 0, -1):
        window = float(starts[-steps]), float(ends[-1])
        found = {rank: _spans(played.ranks[rank], *window) for rank in ranks}
        if sum(map(len, found.values())) <= MOST_SPANS:
            break
    if sum(map(len, found.values())) > MOST_SPANS:
        each = MOST_SPANS // len(ranks)
        limits.append(f"only the longest {each:,} pieces of each rank's work are shown")
        found = {rank: spans.longest(each) for rank, spans in found.items()}
    if steps < analysis.steps:
        limits.insert(0, f"{'the last step is' if steps == 1 else f'the last {steps} steps are'} shown")
    origin = min([window[0], *(float(spans.issued.min(initial=window[0])) for spans in found.values())])
    last = max([window[1], *(float(spans.end.max(initial=window[1])) for spans in found.values())])
    clock = _Clock(origin, max(1, int(np.ceil((last - origin) * 1e9 / _TICKS))))
    modules, whats = _Names(), _Names()
    return {
        "tick_s": clock.tick_s,
        "window": clock.ticks(np.array(window)).tolist(),
        "last": int(clock.ticks(np.array([last]))[0]),
        "steps": [
            {"number": analysis.steps - steps + 1 + place, "end": int(end)}
            for place, end in enumerate(clock.ticks(ends[-steps:]))
        ],
        "limits": limits,
        "ranks": [_rank(analysis, rank, spans, clock, modules, whats) for rank, spans in found.items()],
        "modules": list(modules.numbers),
        "whats": list(whats.numbers),
        "families": {name: title(name) for name in (*FAMILIES, COMMUNICATION)},
    }


@dataclass(frozen=True)
class _Clock:
    origin: float
    tick_ns: int

    @property
    def tick_s(self) -> float:
        return self.tick_ns * 1e-9

    def ticks(self, seconds: np.ndarray) -> np.ndarray:
        return np.clip(np.round((seconds - self.origin) / self.tick_s), 0, _TICKS).astype(np.int64)


def _spans(rank: RankTimeline, start: float, end: float) -> _Spans:
    """What the streams of a rank did in the window. A collective becomes a waiting span and a moving span."""
    here = np.flatnonzero(
        (rank.kind <= WorkKind.MEET) & (rank.over > start) & (rank.began < end) & (rank.over > rank.began)
    )
    waits = here[rank.met[here] > rank.began[here]]
    moves = here[rank.over[here] > rank.met[here]]
    item = np.concatenate([waits, moves])
    waiting = np.arange(len(item)) < len(waits)
    begins = np.where(waiting, rank.began[item], rank.met[item])
    order = np.lexsort((begins, rank.lane[item]))
    item, waiting = item[order], waiting[order]
    return _Spans(
        rank.lane[item], begins[order], np.where(waiting, rank.met[item], rank.over[item]), rank.issued[item],
        rank.event[item], waiting,
    )  # fmt: skip


def _rank(
    analysis: Analysis, rank: int, spans: _Spans, clock: _Clock, modules: _Names, whats: _Names
) -> dict[str, Any]:
    trace = analysis.job.ranks[rank]
    events = trace.events[spans.event]
    what, module = _numbered(analysis, rank, events, modules, whats)
    starts, ends, issued = clock.ticks(spans.start), clock.ticks(spans.end), clock.ticks(spans.issued)
    how = events["phase"] | np.where(spans.waits, WAITS, 0).astype(np.uint8)
    rows = []
    for lane in np.unique(spans.lane).tolist():
        those = spans.lane == lane
        rows.append(
            {
                **_named(trace, lane, events[those]),
                "start": packed(starts[those], "<u4"),
                "length": packed(ends[those] - starts[those], "<u4"),
                "issued": packed(issued[those], "<u4"),
                "what": packed(what[those], "<u4"),
                "module": packed(module[those], "<u4"),
                "how": packed(how[those], "u1"),
            }
        )
    return {"rank": rank, "rows": rows, "syncs": _syncs(analysis, rank, clock)}


def _numbered(
    analysis: Analysis, rank: int, events: np.ndarray, modules: _Names, whats: _Names
) -> tuple[np.ndarray, np.ndarray]:
    """The number of each event in `whats`, and of its module in `modules`."""
    trace, priced = analysis.job.ranks[rank], analysis.durations[rank]
    called = events["kind"] == EventKind.COLLECTIVE
    what = np.zeros(len(events), np.int64)
    for which, known in ((False, priced.ops), (True, priced.collectives)):
        those = called == which
        for subject in np.unique(events["subject"][those]).tolist():
            name, detail = _call(trace, subject) if which else _op(priced.calls[subject])
            family = COMMUNICATION if which else priced.families[subject]
            alone = round(float(known.seconds[subject]) * 1e9)  # ns
            surely = Provenance(int(known.provenance[subject])).name.lower()
            number = whats.number((name, detail, family, alone, surely, known.profiles[known.profile[subject]]))
            what[those & (events["subject"] == subject)] = number
    numbers = np.zeros(len(trace.modules), np.int64)
    for place in np.unique(events["module"]).tolist():
        numbers[place] = modules.number(trace.modules[place])
    return what, numbers[events["module"]]


def _op(call: Call) -> tuple[str, str]:
    shapes = []
    for argument in call.arguments:
        if isinstance(argument, Tensor):
            shapes.append(f"{'x'.join(map(str, argument.sizes)) or 'scalar'} {argument.dtype}")
        elif isinstance(argument, list) and (inside := list(tensors_in(argument))):
            shapes.append(f"{len(inside)} tensors {inside[0].dtype}")
    more = f", and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    return call.op.removeprefix("aten::"), ", ".join(shapes[:4]) + more


def _call(trace: RankTrace, subject: int) -> tuple[str, str]:
    call = trace.collectives[subject]
    group = trace.communicators[call.communicator]
    return call.op, f"{call_in_words(call, group)}, {communicator_in_words(group)}"


def _named(trace: RankTrace, lane: int, events: np.ndarray) -> dict[str, Any]:
    """The name of a stream, and the ranks of its communicator if it only runs collectives."""
    device, stream = trace.streams[lane]
    gpu = f"GPU {device}, " if len({device for device, _ in trace.streams}) > 1 else ""
    called = events["kind"] == EventKind.COLLECTIVE
    note = ""
    if called.all():
        groups = {trace.collectives[subject].communicator for subject in np.unique(events["subject"]).tolist()}
        ranks = {trace.communicators[number].ranks for number in groups}
        note = f"ranks {abbreviated(min(ranks))}" if len(ranks) == 1 else f"{len(ranks)} groups"
    return {"name": f"{gpu}{f'stream {stream}' if stream else 'default stream'}", "note": note}


def _syncs(analysis: Analysis, rank: int, clock: _Clock) -> list[list[Any]]:
    """When the host waited: from a synchronization to its next item."""
    assert analysis.timeline is not None
    items = analysis.timeline.ranks[rank]
    places = np.flatnonzero(np.isin(items.kind[:-1], list(SYNCS)))
    starts, ends = clock.ticks(items.issued[places]), clock.ticks(items.issued[places + 1])
    inside = (ends > starts) & (ends > 0) & (items.issued[places] >= clock.origin)
    return [
        [int(start), int(end), SYNCS[WorkKind(int(items.kind[place]))]]
        for place, start, end in zip(places[inside], starts[inside], ends[inside], strict=True)
    ]
