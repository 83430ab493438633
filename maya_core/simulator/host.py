"""How long the host needs for each call before the GPU receives it.

A host usually runs ahead of its GPU; where the GPU's work is short, the host's calls decide how long a step takes. The modelled
times are the same on every machine that runs Maya. `MEASURED` uses the times of the emulated program instead, which include the
program's own Python code and depend on the speed of the machine.
"""

from __future__ import annotations

import numpy as np

from maya_core.hardware.host_costs import (
    CALL_S,
    DISPATCH_S,
    KERNEL_GAP_S,
    LAUNCH_S,
    NODE_BYTES_PER_S,
    TRITON_S,
    Host,
)
from maya_core.predictor.pricing import TraceDurations
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import REPLAYED, EventKind, Phase


def host_seconds(trace: RankTrace, priced: TraceDurations, chosen: np.ndarray, host: Host) -> np.ndarray:
    """For each of the events at the places `chosen`, the host's time since the event before it."""
    events = trace.events[chosen]
    working = events["kind"] == EventKind.HOST_WORK  # which the emulation does not do
    share = NODE_BYTES_PER_S / trace.meta.get("ranks_per_node", 1)
    if host == Host.MEASURED:
        elapsed = np.diff(events["time_ns"], prepend=0) * 1e-9
        return np.asarray(elapsed + np.where(working, events["a"] / share, 0.0))
    dispatch = np.zeros(max(Phase) + 1)
    for name, seconds in DISPATCH_S.items():
        dispatch[Phase[name]] = seconds
    calls = np.zeros(max(EventKind) + 1)
    for name, seconds in CALL_S.items():
        calls[EventKind[name]] = seconds
    spent: np.ndarray = calls[events["kind"]]
    ops = events["kind"] == EventKind.OP
    triton = np.array([call.triton is not None for call in trace.calls] or [False])
    dispatched = np.where(triton[events["subject"][ops]], TRITON_S, dispatch[events["phase"][ops]])
    spent[ops] = dispatched + LAUNCH_S * priced.launches[events["subject"][ops]]
    spent[(events["flags"] & REPLAYED) > 0] = 0.0  # a graph is launched with one call
    spent[working] = events["a"][working] / share
    return spent


def seconds_alone(priced: TraceDurations) -> np.ndarray:
    """For each call, the op's duration on a device that does nothing else, including the gaps between its kernels."""
    if not len(priced.ops):
        return np.zeros(1)
    return np.where(priced.launches > 0, priced.ops.seconds + KERNEL_GAP_S * priced.launches, 0.0)
