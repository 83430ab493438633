"""Ranks written by hand: what their hosts issue, and how long each item takes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from maya_core.hardware.cluster import Cluster, cluster
from maya_core.hardware.host_costs import KERNEL_GAP_S, Host
from maya_core.ops.kernel import Copy, Kernel, Timed
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.pricing import TraceDurations
from maya_core.simulator.simulate import RankTimeline, Timeline, simulate
from maya_core.trace.call import Call, Tensor
from maya_core.trace.communication import CollectiveCall, Communicator
from maya_core.trace.job import collate
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EVENT, ON_HOST, REPLAYED, EventKind, Phase

MS = 1e-3
HOST = Tensor("Float", (1024,), (1,), "cpu")
DEVICE = Tensor("Float", (1024,), (1,), "cuda")
LARGE = 1 << 24  # elements of messages that wait for their receiver


class Rank:
    """A rank's items in the order in which the host issues them. Times are in milliseconds; stream 0 is the default one."""

    def __init__(self, rank: int = 0, world: int = 1, streams: int = 4) -> None:
        self.rank, self.world, self.streams = rank, world, streams
        self.rows: list[dict[str, int]] = []
        self.calls: list[Call] = []
        self.kernels: list[list[Kernel]] = []  # one for each call
        self.op_s: list[float] = []
        self.communicators: list[Communicator] = []
        self.collectives: list[CollectiveCall] = []
        self.collective_s: list[float] = []
        self.clock_ns = 0
        self.steps = 0

    def _row(self, kind: EventKind, stream: int = 0, **values: int) -> None:
        self.rows.append({"kind": kind, "stream": stream, "time_ns": self.clock_ns, **values})

    def host(self, milliseconds: float) -> Rank:
        """The host is busy for this time before the next item."""
        self.clock_ns += round(milliseconds * 1e6)
        return self

    def host_work(self, gigabytes: float) -> Rank:
        """The host computes, and reads and writes this much memory."""
        self._row(EventKind.HOST_WORK, a=round(gigabytes * 1e9))
        return self

    def compute(self, milliseconds: float, stream: int = 0, phase: Phase = Phase.FORWARD, flags: int = 0) -> Rank:
        call = Call("aten::relu", ["self"], [DEVICE], [DEVICE])
        return self._op(milliseconds, stream, call, Timed("relu", milliseconds * MS), phase, flags)

    def copy_in(self, milliseconds: float, stream: int = 0) -> Rank:
        call = Call("aten::copy_", ["self", "src"], [DEVICE, HOST], [DEVICE])
        return self._op(milliseconds, stream, call, Copy("h2d", DEVICE.nbytes), Phase.FORWARD, 0)

    def _op(self, milliseconds: float, stream: int, call: Call, kernel: Kernel, phase: Phase, flags: int) -> Rank:
        self._row(EventKind.OP, stream, subject=len(self.calls), phase=phase, flags=flags)
        self.calls.append(call)
        self.kernels.append([kernel])
        self.op_s.append(milliseconds * MS - KERNEL_GAP_S)
        return self

    def record(self, event: int, version: int = 1, stream: int = 0) -> Rank:
        self._row(EventKind.EVENT_RECORD, stream, subject=event, a=version)
        return self

    def wait(self, event: int, version: int = 1, stream: int = 0) -> Rank:
        self._row(EventKind.EVENT_WAIT, stream, subject=event, a=version)
        return self

    def host_waits(self, event: int, version: int = 1) -> Rank:
        self._row(EventKind.EVENT_SYNC, subject=event, a=version)
        return self

    def sync(self, stream: int | None = None) -> Rank:
        self._row(EventKind.DEVICE_SYNC if stream is None else EventKind.STREAM_SYNC, stream or 0)
        return self

    def step(self) -> Rank:
        self.steps += 1
        self._row(EventKind.STEP_END, a=self.steps)
        return self

    def collective(
        self, milliseconds: float, stream: int = 1, op: str = "all_reduce", ranks: Iterable[int] = (), group: str = "0",
        peer: int = -1, elements: int = LARGE, host: bool = False,
    ) -> Rank:  # fmt: skip
        members = tuple(ranks) or tuple(range(self.world))
        one = Communicator("gloo" if host else "nccl", group, members, members.index(self.rank))
        if one not in self.communicators:
            self.communicators.append(one)
        self._row(EventKind.COLLECTIVE, stream, subject=len(self.collectives), flags=ON_HOST if host else 0)
        self.collectives.append(CollectiveCall(self.communicators.index(one), op, "Float", elements, elements, peer))
        self.collective_s.append(milliseconds * MS)
        return self

    def send(self, to: int, milliseconds: float, stream: int = 1, elements: int = LARGE) -> Rank:
        return self.collective(milliseconds, stream, "send", peer=to, elements=elements)

    def receive(self, source: int, milliseconds: float, stream: int = 1, elements: int = LARGE) -> Rank:
        return self.collective(milliseconds, stream, "recv", peer=source, elements=elements)

    def group(self, *, begin: bool, stream: int = 1) -> Rank:
        self._row(EventKind.GROUP_BEGIN if begin else EventKind.GROUP_END, stream)
        return self

    def trace(self) -> RankTrace:
        events = np.zeros(len(self.rows), EVENT)
        for place, row in enumerate(self.rows):
            for name, value in row.items():
                events[name][place] = value
        meta = {
            "rank": self.rank, "world_size": self.world, "ended": "completed", "gpu": "a100", "gpus": 8, "ranks_per_node": 8, "torch": "2.13.0", "python": "",
            "gpu_memory_bytes": 1 << 36, "alloc_retries": [0],
        }  # fmt: skip
        return RankTrace(
            meta,
            events,
            self.calls,
            [""],
            [(0, stream) for stream in range(self.streams)],
            self.communicators,
            self.collectives,
            [()],
        )

    def durations(self) -> TraceDurations:
        ops = Durations.of(np.array(self.op_s), Provenance.MEASURED, "by hand")
        return TraceDurations(
            self.calls,
            self.kernels,
            ops,
            ops,
            Durations.of(np.array(self.collective_s), Provenance.MEASURED, "by hand"),
        )


def play(*ranks: Rank, host: Host = Host.MEASURED, machine: Cluster | None = None) -> Timeline:
    """Simulates the ranks. Hosts take the time of `Rank.host` and nothing else, unless they are modelled."""
    job = collate([rank.trace() for rank in ranks])
    world = ranks[0].world
    machine = machine or cluster("a100", min(8, world), -(-world // 8))
    return simulate(job, {rank.rank: rank.durations() for rank in ranks}, machine, host=host)


def ends(timeline: RankTimeline) -> list[float]:
    """When the items on the device were over, in milliseconds."""
    return (timeline.over[timeline.on_device()] / MS).round(6).tolist()


def starts(timeline: RankTimeline) -> list[float]:
    return (timeline.began[timeline.on_device()] / MS).round(6).tolist()


REPLAY = REPLAYED
