"""The host's time for calls, launches and waits. It is the same on every machine, so that a prediction does not depend on where Maya runs.

Keys are the names of the phases and event kinds in trace/schema.py.
"""

from __future__ import annotations

import enum

US = 1e-6


class Host(str, enum.Enum):
    """Where the host's time comes from: these figures, or what the program took while it was emulated."""

    MODELLED = "modelled"
    MEASURED = "measured"

    __str__ = str.__str__  # as in enum.StrEnum, which Python 3.10 does not have


# Back-to-back launches from one thread: 2.4 us (H200 host), 2.6 (A100 host), gpu-benches.
LAUNCH_S = 2.5 * US
# Between the end of a kernel and the start of the next one in the queue: 0.8 us (V100), 1.2 us (A100) in profiles of training (HTA).
KERNEL_GAP_S = 1.0 * US
# From dispatch to launch. Where the host limits those profiles (backward, optimizer), short kernels start 5-8 us apart; a forward op
# also runs Python and creates autograd nodes.
DISPATCH_S = {
    "FORWARD": 7 * US,
    "BACKWARD": 4 * US,
    "RECOMPUTE": 7 * US,
    "OPTIMIZER": 5 * US,
    "VALIDATION": 7 * US,
}
# From generated code to the launch of a Triton kernel, without dispatcher and autograd. Estimated, not measured.
TRITON_S = 2 * US
# Estimated, not measured: the work object, events and stream switches of a collective; a driver call; the wake-up after a wait.
CALL_S = {
    "COLLECTIVE": 30 * US,
    "GROUP_END": 30 * US,  # the group's launch
    "EVENT_RECORD": 1 * US,
    "EVENT_WAIT": 1 * US,
    "EVENT_SYNC": 5 * US,
    "STREAM_SYNC": 5 * US,
    "DEVICE_SYNC": 5 * US,
    "GRAPH_LAUNCH": 8 * US,
}
# Bytes per second of an optimizer on the host, for all ranks of a node together: 28 bytes per parameter (Adam reads four numbers and
# writes three) in 0.25 ns, for 1 to 10 billion parameters on a DGX-2 (CPU-Adam latencies of the ZeRO-Offload paper, arXiv 2101.06840).
NODE_BYTES_PER_S = 28 / 0.25e-9
