"""What the host spends on calls, launches and waits: the same on every machine, so that a program's predicted time does not hang on where
Maya runs. By phase and by kind of event, named as `trace/schema.py` names them."""

from __future__ import annotations

import enum

US = 1e-6


class Host(enum.StrEnum):
    """Where the host's time comes from: these figures, or what the program took while it was emulated."""

    MODELLED = "modelled"
    MEASURED = "measured"


# Back-to-back launches from one thread: 2.4 us (H200 host), 2.6 (A100 host), gpu-benches.
LAUNCH_S = 2.5 * US
# Between the end of a kernel and the start of the next that was queued behind it: 0.8 us (V100), 1.2 (A100) in profiles of training (HTA).
KERNEL_GAP_S = 1.0 * US
# From dispatch to launch. Short kernels of those profiles start 5-8 us after one another where the host is behind (backward,
# optimizer); a forward op has Python and the making of autograd's nodes on top.
DISPATCH_S = {
    "FORWARD": 7 * US,
    "BACKWARD": 4 * US,
    "RECOMPUTE": 7 * US,
    "OPTIMIZER": 5 * US,
}
# From generated code to the launch of a Triton kernel: no dispatcher and no autograd. By judgement.
TRITON_S = 2 * US
# By judgement, not measurement: the work object, events and stream switches around a collective; a driver call; waking up.
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
# What an optimizer on the host gets through in a second, all ranks of a node together: 28 bytes a parameter (Adam's four numbers read,
# three written) in 0.25 ns, 1 to 10 billion parameters on a DGX-2 (CPU-Adam latencies of the ZeRO-Offload paper, arXiv 2101.06840).
NODE_BYTES_PER_S = 28 / 0.25e-9
