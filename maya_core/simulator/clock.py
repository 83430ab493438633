"""clock.cpp, compiled on first use: the schedule it takes, and the times it gives."""

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
QUEUE = 1024  # launches that CUDA takes for a stream before it makes the host wait
ENDLESS = 2**62
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", *WARNINGS)


class WorkKind(enum.IntEnum):
    """Kinds of item, as clock.cpp numbers them."""

    COMPUTE = 0
    COPY_IN = 1  # host to device
    COPY_OUT = 2
    MEET = 3  # a collective or message, or a group of them
    RECORD = 4  # an event, by its number
    WAIT = 5  # the lane, for an event
    HOST_EVENT = 6  # the host waits for an event,
    HOST_LANE = 7  # for all that a lane has,
    HOST_DEVICE = 8  # for all that a device has,
    HOST_MEET = 9  # for a collective of host data
    MARK = 10  # nothing: a place in the program


class LinkUse(enum.IntEnum):
    """What a meeting shares with others."""

    WITHIN_NODE = 0
    BETWEEN_NODES = 1
    UNSHARED = 2  # messages: a batch of them was priced together


@dataclass(frozen=True)
class Schedule:
    """All ranks' items one after the other; ranks, lanes, devices, events and meetings are numbered over the job."""

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
    """In seconds from the start. By item; of what the host does itself only `issued` and `over` differ."""

    issued: np.ndarray  # by the host
    began: np.ndarray
    met: np.ndarray  # data moves: all members are there
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
        "",  # two seconds
        lambda _, made: run_compiler([*FLAGS, str(SOURCE), "-o", str(made)], "the simulator"),
    )
    library = ctypes.CDLL(str(path))
    library.maya_simulate.restype = ctypes.c_int64
    library.maya_simulate.argtypes = [ctypes.POINTER(_Job), ctypes.POINTER(_Result)]
    return library


def play(schedule: Schedule) -> Times:
    """Puts the schedule on the clock."""
    times, stuck = _play(schedule, QUEUE)
    if stuck:  # how long queues are is not known to the launch: nobody is said to hang for that
        times, stuck = _play(schedule, ENDLESS)
    if stuck:
        raise MayaError(
            "the job comes to a stop: ranks or streams wait for what never happens.",
            "`maya run` says which collectives do not meet; there is no step time for a job that hangs.",
        )
    return times


def _play(schedule: Schedule, queue: int) -> tuple[Times, int]:
    """The times, and how many ranks and lanes never came to their end."""
    arrays = {name: np.ascontiguousarray(getattr(schedule, name), dtype) for name, dtype in _FIELDS.items()}
    items, ranks = len(schedule.kind), len(schedule.first_item) - 1
    counts = (items, ranks, len(schedule.device_of), schedule.devices, schedule.events, len(schedule.members), queue)
    job = _Job(*counts, *(array.ctypes.data for array in arrays.values()))
    times = Times(np.zeros(items), np.zeros(items), np.zeros(items), np.zeros(items), np.zeros(ranks))
    result = _Result(*(getattr(times, name).ctypes.data for name in _TIMES))
    return times, _library().maya_simulate(ctypes.byref(job), ctypes.byref(result))
