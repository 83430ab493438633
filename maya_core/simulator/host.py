"""What the host spends on each call before the GPU hears of it.

A host is taken to be ahead of its GPU unless the GPU's work is short: then the step is as long as the host's calls. The same
program costs the same on every machine Maya runs on. `MEASURED` takes the times the program took under emulation instead: they
have the program's own Python in them, and the machine's speed of that day.
"""

from __future__ import annotations

import enum

import numpy as np

from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import REPLAYED, Kind, Phase

US = 1e-6

# Back-to-back launches from one thread: 2.4 us (H200 host), 2.6 (A100 host), gpu-benches.
LAUNCH_S = 2.5 * US
# Between the end of a kernel and the start of the next that was queued behind it: 0.8 us (V100), 1.2 (A100) in profiles of training (HTA).
KERNEL_GAP_S = 1.0 * US
# From dispatch to launch. Short kernels of those profiles start 5-8 us after one another where the host is behind (backward,
# optimizer); a forward op has Python and the making of autograd's nodes on top.
DISPATCH_S = {
    Phase.FORWARD: 7 * US,
    Phase.BACKWARD: 4 * US,
    Phase.RECOMPUTE: 7 * US,
    Phase.OPTIMIZER: 5 * US,
}
# From generated code to the launch of a Triton kernel: no dispatcher and no autograd. By judgement.
TRITON_S = 2 * US
# By judgement, not measurement: the work object, events and stream switches around a collective; a driver call; waking up.
CALL_S = {
    Kind.COLLECTIVE: 30 * US,
    Kind.GROUP_END: 30 * US,  # the group's launch
    Kind.EVENT_RECORD: 1 * US,
    Kind.EVENT_WAIT: 1 * US,
    Kind.EVENT_SYNC: 5 * US,
    Kind.STREAM_SYNC: 5 * US,
    Kind.DEVICE_SYNC: 5 * US,
    Kind.GRAPH_LAUNCH: 8 * US,
}
# What an optimizer on the host gets through in a second, all ranks of a node together: 28 bytes a parameter (Adam's four numbers read,
# three written) in 0.25 ns, 1 to 10 billion parameters on a DGX-2 (CPU-Adam latencies of the ZeRO-Offload paper, arXiv 2101.06840).
NODE_BYTES_PER_S = 28 / 0.25e-9


class Host(enum.StrEnum):
    MODELLED = "modelled"
    MEASURED = "measured"


def host_seconds(trace: RankTrace, chosen: np.ndarray, host: Host) -> np.ndarray:
    """The host's time from each of these events' predecessor to itself; `chosen` are places among the trace's events."""
    events = trace.events[chosen]
    working = events["kind"] == Kind.HOST_WORK  # which is not done under emulation
    share = NODE_BYTES_PER_S / trace.meta.get("ranks_per_node", 1)
    if host == Host.MEASURED:
        return np.diff(events["time_ns"], prepend=0) * 1e-9 + np.where(working, events["a"] / share, 0.0)
    dispatch = np.zeros(max(Phase) + 1)
    for phase, seconds in DISPATCH_S.items():
        dispatch[phase] = seconds
    calls = np.zeros(max(Kind) + 1)
    for kind, seconds in CALL_S.items():
        calls[kind] = seconds
    launches = np.array([signature.launches for signature in trace.signatures] or [0])
    spent = calls[events["kind"]]
    ops = events["kind"] == Kind.OP
    triton = np.array([signature.kernel is not None for signature in trace.signatures] or [False])
    dispatched = np.where(triton[events["subject"][ops]], TRITON_S, dispatch[events["phase"][ops]])
    spent[ops] = dispatched + LAUNCH_S * launches[events["subject"][ops]]
    spent[(events["flags"] & REPLAYED) > 0] = 0.0  # a graph is one call
    spent[working] = events["a"][working] / share
    return spent


def seconds_alone(trace: RankTrace, op_seconds: np.ndarray) -> np.ndarray:
    """By signature: an op's time on a device that does nothing else, with the gaps between its kernels."""
    launches = np.array([signature.launches for signature in trace.signatures] or [0])
    return np.where(launches > 0, op_seconds + KERNEL_GAP_S * launches, 0.0) if len(op_seconds) else np.zeros(1)
