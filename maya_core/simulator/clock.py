"""The Python interface of clock.cpp, which is compiled on first use: its input (Schedule) and its output (Times)."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maya_core.cpp_build import WARNINGS, compiled, run_compiler
from maya_core.errors import MayaError

SOURCE = Path(__file__).with_name("clock.cpp")
QUEUE = 1024  # launches that CUDA queues for a stream before the host has to wait
ENDLESS = 2**62
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", *WARNINGS)


class WorkKind(enum.IntEnum):
    """Kinds of item, with the numbers of clock.cpp."""

    COMPUTE = 0
    COPY_IN = 1  # host to device
    COPY_OUT = 2
    MEET = 3  # a collective or message, or a group of them
    RECORD = 4  # an event, by its number
    WAIT = 5  # the lane waits for an event
    HOST_EVENT = 6  # the host waits for an event
    HOST_LANE = 7  # the host waits for everything on a lane
    HOST_DEVICE = 8  # the host waits for everything on a device
    HOST_MEET = 9  # the host waits for a collective of host data
    MARK = 10  # marks a place in the program and takes no time


class LinkUse(enum.IntEnum):
    """The links that a meeting shares with others."""

    WITHIN_NODE = 0
    BETWEEN_NODES = 1
    UNSHARED = 2  # messages, because a batch of them is priced together


@dataclass(frozen=True)
class Schedule:
    """The items of all ranks, one rank after the other. Ranks, lanes, devices, events and meetings are numbered over the job."""

    kind: np.ndarray
    lane: np.ndarray
    subject: np.ndarray
    host_s: np.ndarray
    work_s: np.ndarray
    first_part: np.ndarray
    meeting: np.ndarray
    waits: np.ndarray
    first_item: np.ndarray
    device_of: np.ndarray
    members: np.ndarray
    meeting_s: np.ndarray
    pressure: np.ndarray
    link: np.ndarray
    devices: int
    events: int


@dataclass(frozen=True)
class Times:
    """Times in seconds from the start, by item. For items of the host, only `issued` and `over` can differ."""

    issued: np.ndarray  # when the host issued it
    began: np.ndarray
    met: np.ndarray  # when data moves, because all members have arrived
    over: np.ndarray
    host_over: np.ndarray  # by rank


_FIELDS = {
    "kind": np.uint8, "lane": np.int32, "subject": np.int32, "host_s": np.float64, "work_s": np.float64,
    "first_part": np.int64, "meeting": np.int32, "waits": np.uint8, "first_item": np.int64, "device_of": np.int32,
    "members": np.int32, "meeting_s": np.float64, "pressure": np.float64, "link": np.uint8,
}  # fmt: skip
_COUNTS = ("items", "ranks", "lanes", "devices", "events", "meetings", "queue")
_TIMES = ("issued", "began", "met", "over", "host_over")


class _Job(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in _COUNTS), *((name, ctypes.c_void_p) for name in _FIELDS)]


class _Result(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _TIMES]


@functools.cache
def _library() -> ctypes.CDLL:
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    path = compiled(
        f"clock-{platform.machine()}-{digest}",
        "clock.so",
        "",  # no notice: it takes two seconds
        lambda _, made: run_compiler([*FLAGS, str(SOURCE), "-o", str(made)], "the simulator"),
    )
    library = ctypes.CDLL(str(path))
    library.maya_simulate.restype = ctypes.c_int64
    library.maya_simulate.argtypes = [ctypes.POINTER(_Job), ctypes.POINTER(_Result)]
    return library


def play(schedule: Schedule) -> Times:
    """Computes the times of a schedule."""
    times, stuck = _play(schedule, QUEUE)
    if stuck:  # the exact length of CUDA's queues is not known, so a short queue is no reason to report a hang
        times, stuck = _play(schedule, ENDLESS)
    if stuck:
        raise MayaError(
            "the job hangs: ranks or streams wait for something that never happens.",
            "A job that hangs has no step time. `maya run` shows which collectives do not meet.",
        )
    return times


def _play(schedule: Schedule, queue: int) -> tuple[Times, int]:
    """Returns the times, and how many ranks and lanes never finished."""
    arrays = {name: np.ascontiguousarray(getattr(schedule, name), dtype) for name, dtype in _FIELDS.items()}
    items, ranks = len(schedule.kind), len(schedule.first_item) - 1
    counts = (items, ranks, len(schedule.device_of), schedule.devices, schedule.events, len(schedule.members), queue)
    job = _Job(*counts, *(array.ctypes.data for array in arrays.values()))
    times = Times(np.zeros(items), np.zeros(items), np.zeros(items), np.zeros(items), np.zeros(ranks))
    result = _Result(*(getattr(times, name).ctypes.data for name in _TIMES))
    return times, _library().maya_simulate(ctypes.byref(job), ctypes.byref(result))
