"""The numbers that a trace consists of. They are stored on disk: append, never renumber. native/trace.h has the same ones."""

from __future__ import annotations

import enum

import numpy as np

# 2 added collectives, 3 the lines of allocations, 4 the work of the host, 5 kernels in Triton. 6 added torch's settings to calls
# and removed the launches of the GPU on which they were recorded. 7 added evaluation.
VERSION = 7

EVENT = np.dtype(
    [
        ("time_ns", "<i8"),  # host clock since recording began
        ("a", "<i8"),
        ("b", "<i8"),
        ("subject", "<u4"),
        ("module", "<u4"),  # index into modules; 0: outside any module
        ("stream", "<u2"),  # index into streams
        ("kind", "u1"),
        ("phase", "u1"),
        ("device", "u1"),
        ("thread", "u1"),
        ("flags", "<u2"),
    ]
)


class EventKind(enum.IntEnum):
    """What happened. The comments say what `subject`, `a` and `b` mean."""

    OP = 0  # subject: call
    ALLOC = 1  # subject: line of the program, a: address, b: bytes
    FREE = 2  # a: address, b: bytes
    SEGMENT_ALLOC = 3  # a: address, b: bytes
    SEGMENT_FREE = 4  # a: address, b: bytes
    EVENT_RECORD = 5  # subject: event, a: version
    EVENT_WAIT = 6  # the stream waits for (subject, a)
    EVENT_SYNC = 7  # the host waits for (subject, a)
    STREAM_SYNC = 8  # the host waits for the stream
    DEVICE_SYNC = 9  # the host waits for the device
    STEP_END = 10  # a: step, from 1
    GRAPH_LAUNCH = 11  # subject: graph, a: the number of following events that it replays
    OUT_OF_MEMORY = 12  # a: bytes requested
    LABEL = 13  # subject: category of the block at address a
    COLLECTIVE = 14  # subject: call, a: sequence number on its communicator, or between two ranks, b: call site
    GROUP_BEGIN = 15  # collectives up to GROUP_END on this stream are one launch; subject: communicator
    GROUP_END = 16
    HOST_WORK = 17  # the host computes; a: bytes it reads and writes
    EVALUATION = 18  # subject: evaluation loop, a: EvaluationMark


class Phase(enum.IntEnum):
    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3
    VALIDATION = 4


class EvaluationMark(enum.IntEnum):
    """What happens in an evaluation loop."""

    BEGIN = 0
    BATCH_BEGIN = 1
    BATCH_END = 2
    END = 3


class Category(enum.IntEnum):
    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    BUFFERS = 3
    WORKSPACES = 4  # cuBLAS


# Flags.
REPLAYED = 1  # launched by a CUDA graph
ON_HOST = 2  # a collective of host tensors: no stream takes part
TEMPORARY = 4  # memory that a kernel allocates and frees within its call
