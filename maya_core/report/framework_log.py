"""Fills predicted numbers into the log lines of a framework. While the program runs, times are not known yet, so the integration
suppresses the line and records it (`Emulation.log`, by name) with places to fill in:

    {"text": "iteration 3 | elapsed time per iteration (ms): {step_ms:.1f} | throughput: {rates[0]:.1f} |", "work": [4.2e6]}
    {"text": "forward: {seconds[0]:si}s, {rates[0]:si}FLOPS", "spans": [[[120, 340]]], "work": [[8.1e12, [0]]]}

A span is the time between two CUDA events, or the sum of several such times; an event is given by its place in the rank's
record. `seconds` and `ms` are the spans, and `ms` is divided by `over` if that is given. `rates` is each `work` per millisecond of
the predicted step, or of the spans that are named with it. `:si` writes a number with a prefix: 1.5e12 as "1.5 T".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maya_core.report.analysis import Analysis
from maya_core.simulator.clock import WorkKind
from maya_core.trace.schema import EventKind

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))

Pairs = list[tuple[int, int]]


class Filled(float):
    """A number in a log line, which also supports the format `:si`."""

    def __format__(self, spec: str) -> str:
        if spec != "si":
            return super().__format__(spec)
        size, prefix = next((one for one in PREFIXES if abs(self) >= one[0]), PREFIXES[-1])
        return f"{round(self / size, 2):g} {prefix}"


def framework_log(analysis: Analysis) -> list[str]:
    if not analysis.step_time_s:
        return []
    lines = []
    for rank, trace in analysis.job.ranks.items():
        for entry in (trace.meta.get("log") or {}).values():
            spans = [span_s(analysis, rank, pairs) for pairs in entry.get("spans", ())]
            if None not in spans:
                lines.append(_filled(entry, analysis.step_time_s, [one for one in spans if one is not None]))
    return lines


def _filled(entry: dict[str, Any], step_s: float, spans: list[float]) -> str:
    def rate(work: Any) -> Filled:
        amount, during = work if isinstance(work, list | tuple) else (work, None)
        taken = step_s if during is None else sum(spans[one] for one in during)
        return Filled(amount / (taken * 1e3) if taken else float("inf"))

    text: str = entry["text"]
    return text.format(
        step_ms=step_s * 1e3,
        step_s=step_s,
        seconds=[Filled(one) for one in spans],
        ms=[Filled(one * 1e3 / entry.get("over", 1)) for one in spans],
        rates=[rate(work) for work in entry.get("work", ())],
    )


def span_s(analysis: Analysis, rank: int, pairs: Pairs) -> float | None:
    """The sum of the times between each pair of events. None if the trace of the rank ends before one of them."""
    assert analysis.timeline is not None
    events = analysis.job.ranks[rank].events
    inserted = (EventKind.STEP_END, EventKind.EVALUATION)  # after the recording
    recorded = np.flatnonzero(~np.isin(events["kind"], inserted))
    timeline = analysis.timeline.ranks[rank]
    records = np.flatnonzero(timeline.kind == WorkKind.RECORD)
    items = dict(zip(timeline.event[records].tolist(), records.tolist(), strict=True))
    total = 0.0
    for pair in pairs:
        if max(pair) >= len(recorded):
            return None
        begin, end = (items[int(recorded[place])] for place in pair)
        total += float(timeline.over[end] - timeline.over[begin])
    return total
