"""Collating ranks' traces into jobs, and finding hangs in them. The traces are made by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maya_core.errors import MayaError
from maya_core.trace import RankTrace, write_trace
from maya_core.trace.call_names import abbreviated, frames_of_interest
from maya_core.trace.communication import CollectiveCall, Communicator, Frame
from maya_core.trace.hangs import Hang, find_hangs
from maya_core.trace.job import collate, read_job, trace_path, write_manifest
from maya_core.trace.schema import EVENT, ON_HOST, EventKind

pytestmark = pytest.mark.slow

WORLD = ("nccl", "world")
TORCH = Frame("/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 2987, "all_reduce")
MAIN, SIDE = 0, 1  # streams


class Rank:
    """Builds a rank's trace. Call sites are lines of train.py; the line is the number of earlier events."""

    def __init__(self, rank: int, world_size: int = 2) -> None:
        self.rank = rank
        self.world_size = world_size
        self.groups: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.calls: list[CollectiveCall] = []
        self.events: list[tuple[int, int, int, int, int, int]] = []  # kind, subject, a, b, stream, flags
        self.counts: dict[Any, int] = {}
        self.steps = 0
        self.assumed: list[int] = []

    def event(
        self, kind: EventKind, subject: int = 0, a: int = 0, b: int = 0, stream: int = MAIN, flags: int = 0
    ) -> None:
        self.events.append((kind, subject, a, b, stream, flags))

    def call(
        self,
        op: str,
        elements: int = 1024,
        *,
        group: tuple[str, str] = WORLD,
        among: tuple[int, ...] | None = None,
        peer: int = -1,
        out: int | None = None,
        dtype: str = "Float",
        reduction: str = "",
        splits_in: tuple[int, ...] = (),
        splits_out: tuple[int, ...] = (),
        stream: int = MAIN,
        tag: int = 0,
    ) -> None:
        """`peer` is a global rank."""
        ranks = among or tuple(range(self.world_size))
        number = self.groups.setdefault((*group, ranks), len(self.groups))
        place = ranks.index(peer) if peer >= 0 else -1
        out = elements if out is None else out
        made = CollectiveCall(number, op, dtype, elements, out, place, reduction, splits_in, splits_out)
        if made not in self.calls:
            self.calls.append(made)
        line = (number, op, peer, tag) if op in ("send", "recv") else (number,)
        count = self.counts[line] = self.counts.get(line, -1) + 1
        flags = ON_HOST if group[0] == "gloo" else 0
        self.event(EventKind.COLLECTIVE, self.calls.index(made), (tag << 32) + count, len(self.events), stream, flags)

    def step(self) -> None:
        self.steps += 1
        self.event(EventKind.STEP_END, a=self.steps)

    def trace(self, ended: str = "completed") -> RankTrace:
        events = np.zeros(len(self.events), EVENT)
        for column, name in enumerate(("kind", "subject", "a", "b", "stream", "flags")):
            events[name] = [event[column] for event in self.events]
        communicators = [
            Communicator(backend, name, ranks, ranks.index(self.rank)) for backend, name, ranks in self.groups
        ]
        sites = [(Frame("train.py", line, "main"), TORCH) for line in range(len(self.events))]
        meta = {"rank": self.rank, "world_size": self.world_size, "ended": ended, "assumed_ranks": self.assumed}
        return RankTrace(meta, events, [], [""], [(0, 0), (0, 1), (0, 2)], communicators, self.calls, sites)


def ranks(count: int) -> list[Rank]:
    return [Rank(rank, count) for rank in range(count)]


def hangs(job: list[Rank], ended: dict[int, str] | None = None) -> list[Hang]:
    return find_hangs(collate([one.trace((ended or {}).get(one.rank, "completed")) for one in job]))


def the_hang(job: list[Rank], ended: dict[int, str] | None = None) -> str:
    (hang,) = hangs(job, ended)
    return str(hang)


# ---- collation ----


def test_calls_meet_by_their_order_and_messages_by_their_ends() -> None:
    job = ranks(3)
    for one in job:
        one.call("all_reduce")
        one.call("barrier", among=(0, 1, 2), group=("gloo", "world"))
        one.call("all_reduce")
    job[0].call("send", peer=2)
    job[2].call("recv", peer=0)
    collated = collate([one.trace() for one in reversed(job)])
    assert list(collated.ranks) == [0, 1, 2] and collated.world_size == 3
    nccl, gloo, message = collated.rendezvous
    assert nccl.members == (0, 1, 2) and nccl.events.tolist() == [[0, 0, 0], [2, 2, 2]]
    assert gloo.communicator.backend == "gloo" and gloo.events.tolist() == [[1, 1, 1]]
    assert message.messages and message.members == (0, 2) and message.events.tolist() == [[3, 3]]


def test_gloo_messages_are_told_apart_by_tag() -> None:
    a, b = job = ranks(2)
    for tag in (7, 5):
        a.call("send", 10 + tag, peer=1, group=("gloo", "world"), tag=tag)
    for tag in (5, 7):
        b.call("recv", 10 + tag, peer=0, group=("gloo", "world"), tag=tag)
    assert hangs(job) == []
    b.call("recv", peer=0, group=("gloo", "world"), tag=9)
    assert "never sent" in the_hang(job)


def test_ranks_that_were_not_emulated_are_no_mismatch() -> None:
    one = Rank(1, world_size=4)
    one.call("all_reduce")
    one.call("send", peer=2, elements=2**24)
    one.call("recv", peer=0)
    (only,) = collate([one.trace()]).rendezvous
    assert only.members == (1,)
    assert hangs([one]) == []


def test_a_graph_replays_the_number_it_captured() -> None:
    job = ranks(2)
    for one in job:
        one.call("all_reduce")
        one.events += one.events
        one.call("broadcast", peer=0)
    (meet,) = collate([one.trace() for one in job]).rendezvous
    assert meet.events.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_a_group_made_again_goes_on_as_the_one_it_was() -> None:
    job = ranks(2)
    for one in job:
        one.call("all_reduce")
        one.call("all_reduce", group=("nccl", "again"))
    traces = [one.trace() for one in job]
    again = [replace(trace, communicators=[trace.communicators[0]] * 2) for trace in traces]
    (meet,) = collate(again).rendezvous
    assert meet.events.tolist() == [[0, 0], [1, 1]]


def test_what_comes_after_the_last_common_step_is_ignored() -> None:
    a, b = job = ranks(2)
    for one in job:
        one.call("all_reduce")
        one.step()
    b.call("all_reduce")
    b.step()
    b.call("broadcast", peer=0)
    assert hangs(job, {0: "stopped", 1: "stopped"}) == []
    assert hangs(job, {0: "stopped", 1: "completed"}) == []
    assert len(collate([a.trace("stopped"), b.trace()]).ranks[1].events) == 2
    # A rank that ended by itself makes no more calls, so the other one waits.
    assert "rank 0 never makes call 2" in the_hang(job, {0: "completed", 1: "stopped"})
    assert "rank 0 failed, and rank 1 would wait" in the_hang(job, {0: "failed", 1: "stopped"})


def test_a_rank_that_takes_no_steps_may_run_on() -> None:
    a, b = job = ranks(2)
    for one in job:
        one.call("all_reduce")
    a.step()
    b.call("all_reduce")
    assert hangs(job, {0: "stopped", 1: "completed"}) == []


# ---- the folder ----


def written(folder: Path) -> None:
    ranks = [Rank(0, 16), Rank(8, 16)]
    for one in ranks:
        one.call("all_reduce")
        write_trace(trace_path(folder, one.rank), one.trace())
    job = collate([one.trace() for one in ranks])
    write_manifest(folder, replace(job, world_size=16, nodes=2, gpus_per_node=8, command=("torchrun", "train.py")))


def test_a_job_is_read_from_its_folder(tmp_path: Path) -> None:
    written(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"job.json", "rank-00000.trace", "rank-00008.trace"}
    job = read_job(tmp_path)
    assert (job.world_size, job.nodes, job.gpus_per_node, list(job.ranks)) == (16, 2, 8, [0, 8])
    assert job.rendezvous[0].members == (0, 8)
    assert job.command == ("torchrun", "train.py")
    assert find_hangs(job) == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "job.json").unlink(), "holds no run"),
        (lambda folder: (folder / "job.json").write_text("{"), r"job\.json is not a Maya job"),
        (lambda folder: (folder / "job.json").write_text('{"format": "photo album"}'), "not a Maya job"),
        (lambda folder: trace_path(folder, 8).unlink(), "rank 8 of the job .* cannot be read: no trace"),
        (lambda folder: trace_path(folder, 8).write_text("?"), "rank 8 of the job .* not a whole Maya trace"),
        (
            lambda folder: (folder / "job.json").write_text(
                (folder / "job.json").read_text().replace('"version": 1', '"version": 9')
            ),
            "newer Maya",
        ),
    ],
    ids=["unfinished", "damaged", "another kind", "rank missing", "rank damaged", "newer"],
)
def test_an_unfinished_or_damaged_job_is_refused(tmp_path: Path, damage: Any, says: str) -> None:
    written(tmp_path)
    damage(tmp_path)
    with pytest.raises(MayaError, match=says):
        read_job(tmp_path)


# ---- calls that do not match ----


def test_another_op_at_the_same_call() -> None:
    job = ranks(8)
    for one in job:
        one.call("all_reduce", 4096, reduction="sum")
    for one in job:
        if one.rank == 3:
            one.call("broadcast", 4096, peer=0, dtype="BFloat16")
        one.call("all_reduce", 4096, reduction="sum")
    assert the_hang(job) == "\n".join(
        [
            "This job would hang: the ranks disagree in call 2 on nccl communicator world (8 ranks: 0-7)",
            "  ranks 0-2, 4-7: in all_reduce (sum) of 4,096 Float (16.0 KiB)",
            "    train.py:1 in main",
            "  rank 3: in broadcast from rank 0 of 4,096 BFloat16 (8.0 KiB)",
            "    train.py:1 in main",
        ]
    )


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"op": "all_reduce"}, {"op": "all_reduce", "dtype": "Half"}, "1,024 Half"),
        ({"op": "all_reduce"}, {"op": "all_reduce", "elements": 1}, "of 1 Float (4 B)"),
        ({"op": "all_reduce", "reduction": "sum"}, {"op": "all_reduce", "reduction": "max"}, "all_reduce (max)"),
        ({"op": "broadcast", "peer": 0}, {"op": "broadcast", "peer": 1}, "broadcast from rank 1"),
        ({"op": "reduce", "peer": 0}, {"op": "reduce", "peer": 1}, "reduce to rank 1"),
        ({"op": "all_gather", "out": 2048}, {"op": "all_gather", "elements": 4, "out": 8}, "of 4 Float"),
        ({"op": "reduce_scatter_tensor", "out": 512}, {"op": "reduce_scatter_tensor", "elements": 8, "out": 4}, "of 8"),
        ({"op": "gather", "peer": 0, "out": 2048}, {"op": "gather", "peer": 0, "elements": 9, "out": 0}, "of 9 Float"),
        ({"op": "scatter", "peer": 0, "elements": 8, "out": 4}, {"op": "scatter", "peer": 0, "elements": 0, "out": 3}, "of 3"),
        ({"op": "all_to_all"}, {"op": "all_to_all", "elements": 512}, "rank 0 sends 512 elements to rank 1, which expects 256"),
        (
            {"op": "all_to_all", "elements": 7, "out": 6, "splits_in": (3, 4), "splits_out": (3, 3)},
            {"op": "all_to_all", "elements": 5, "out": 5, "splits_in": (3, 2), "splits_out": (3, 2)},
            "rank 0 sends 4 elements to rank 1, which expects 3",
        ),
        (
            {"op": "all_gather", "elements": 3, "out": 5, "splits_out": (3, 2)},
            {"op": "all_gather", "elements": 4, "out": 7, "splits_out": (3, 4)},
            "rank 1 sends 4 elements to rank 0, which expects 2",
        ),
    ],
)  # fmt: skip
def test_the_same_op_on_other_terms(one: dict[str, Any], other: dict[str, Any], words: str) -> None:
    job = ranks(2)
    job[0].call(**one)
    job[1].call(**other)
    text = the_hang(job)
    assert text.startswith(
        "This job would hang or continue with wrong data: the ranks disagree in call 1 on nccl communicator world"
    )
    assert words in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"op": "barrier", "dtype": "Float", "elements": 1}, {"op": "barrier", "dtype": "", "elements": 0}),
        ({"op": "all_gather", "out": 2048}, {"op": "all_gather_into_tensor", "out": 2048}),
        ({"op": "gather", "peer": 0, "out": 2048}, {"op": "gather", "peer": 0, "out": 0}),
        ({"op": "scatter", "peer": 0, "elements": 8, "out": 4}, {"op": "scatter", "peer": 0, "elements": 0, "out": 4}),
        (
            {"op": "all_to_all", "elements": 7, "out": 6, "splits_in": (3, 4), "splits_out": (3, 3)},
            {"op": "all_to_all", "elements": 5, "out": 6, "splits_in": (3, 2), "splits_out": (4, 2)},
        ),
        (
            {"op": "all_gather", "elements": 3, "out": 7, "splits_out": (3, 4)},
            {"op": "all_gather", "elements": 4, "out": 7, "splits_out": (3, 4)},
        ),
    ],
)
def test_terms_that_may_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    job = ranks(2)
    job[0].call(**one)
    job[1].call(**other)
    assert hangs(job) == []


def test_sizes_that_were_assumed_are_not_held_against_another_rank() -> None:
    job = ranks(2)
    job[0].call("all_to_all", 7, out=6, splits_in=(3, 4), splits_out=(3, 3))
    job[1].call("all_to_all", 5, out=5, splits_in=(3, 2), splits_out=(3, 2))
    assert "rank 0 sends 4 elements to rank 1, which expects 3" in the_hang(job)
    job[1].assumed = [0]
    assert hangs(job) == []


def test_a_rank_that_stops_calling() -> None:
    job = ranks(4)
    for one in job:
        one.call("all_reduce")
        if one.rank != 2:
            one.call("all_reduce", 2**20)
    assert the_hang(job) == "\n".join(
        [
            "This job would hang: rank 2 never makes call 2 on nccl communicator world (4 ranks: 0-3)",
            "  ranks 0-1, 3: in all_reduce of 1,048,576 Float (4.0 MiB)",
            "    train.py:1 in main",
            "  rank 2: its program has ended; its last collective call was all_reduce of 1,024 Float (4.0 KiB) on nccl communicator world (4 ranks: 0-3)",
            "    train.py:0 in main",
        ]
    )


def test_a_rank_that_never_calls() -> None:
    a, _ = job = ranks(2)
    a.call("barrier")
    assert "rank 1: its program has ended without a collective call" in the_hang(job)


def test_a_rank_that_failed_is_named_as_the_cause_once() -> None:
    job = ranks(3)
    for one in job:
        one.call("all_reduce")
        if one.rank < 2:
            one.call("all_reduce", 64)
            one.call("barrier", group=("gloo", "world"))
    text = the_hang(job, {2: "failed"})
    assert text.startswith("This job would hang: rank 2 failed, and ranks 0-1 would wait forever\n")
    assert "ranks 0-1: in all_reduce of 64 Float (256 B), call 2 on nccl communicator world (3 ranks: 0-2)" in text
    assert "rank 2: failed (see its own error); its last collective call was all_reduce of 1,024 Float" in text
    assert "barrier" not in text


def test_a_failed_rank_nobody_waits_for() -> None:
    job = ranks(2)
    for one in job:
        one.call("all_reduce")
    assert hangs(job, {0: "failed", 1: "failed"}) == []


def test_a_send_nobody_receives_and_a_receive_nobody_sends() -> None:
    a, b = job = ranks(2)
    a.call("send", 2**21, peer=1)
    text = the_hang(job)
    assert text.startswith("This job would hang: message 1 from rank 0 to rank 1 on nccl communicator world")
    assert "is never received" in text and "in send to rank 1 of 2,097,152 Float (8.0 MiB)" in text
    a, b = job = ranks(2)
    a.call("send", peer=1)
    assert the_hang(job).startswith("This job would hang or continue with wrong data")  # NCCL buffers it
    a, b = job = ranks(2)
    b.call("recv", peer=0)
    assert the_hang(job).startswith("This job would hang: message 1 from rank 0 to rank 1")
    assert "is never sent" in the_hang(job)


def test_a_message_of_another_size() -> None:
    a, b = job = ranks(2)
    a.call("send", 100, peer=1)
    b.call("recv", 50, peer=0)
    assert "the ranks disagree in message 1 from rank 0 to rank 1 on nccl communicator world (2 ranks: 0-1)" in (
        the_hang(job)
    )
    b.calls[0] = replace(b.calls[0], elements_in=100, elements_out=100, dtype="Half")
    assert "100 Half (200 B)" in the_hang(job)


# ---- calls that match, in an order that does not ----


def both_ways(first: dict[str, Any], second: dict[str, Any]) -> list[Rank]:
    a, b = job = ranks(2)
    for one, order in ((a, (first, second)), (b, (second, first))):
        for options in order:
            one.call("all_reduce", **options)
    return job


def test_two_communicators_in_opposite_order() -> None:
    one, other = {"group": ("nccl", "one")}, {"group": ("nccl", "other")}
    text = the_hang(both_ways(one, other))
    assert text == "\n".join(
        [
            "This job would hang: every call has a match, but the ranks wait for each other in a cycle",
            "  rank 0: in all_reduce of 1,024 Float (4.0 KiB), call 1 on nccl communicator one (2 ranks: 0-1), waiting for rank 1",
            "    train.py:0 in main",
            "  rank 1: in all_reduce of 1,024 Float (4.0 KiB), call 1 on nccl communicator other (2 ranks: 0-1), waiting for rank 0",
            "    train.py:0 in main",
        ]
    )
    assert hangs(both_ways(one | {"stream": MAIN}, other | {"stream": SIDE})) == []
    assert "in a cycle" in the_hang(both_ways({"group": ("gloo", "one")}, {"group": ("gloo", "other")}))


@pytest.mark.parametrize("wait", ["none", "event wait", "event sync", "stream sync", "device sync", "another event"])
def test_streams_wait_as_they_are_told(wait: str) -> None:
    a, b = job = ranks(2)
    for one, names in ((a, ("one", "other")), (b, ("other", "one"))):
        one.event(EventKind.EVENT_RECORD, subject=3, a=1, stream=SIDE)
        one.call("all_reduce", group=("nccl", names[0]), stream=SIDE)
        one.event(EventKind.EVENT_RECORD, subject=3, a=2, stream=SIDE)
        if wait == "event wait":
            one.event(EventKind.EVENT_WAIT, subject=3, a=2)
        elif wait == "event sync":
            one.event(EventKind.EVENT_SYNC, subject=3, a=2)
        elif wait == "stream sync":
            one.event(EventKind.STREAM_SYNC, stream=SIDE)
        elif wait == "device sync":
            one.event(EventKind.DEVICE_SYNC)
        elif wait == "another event":  # recorded before the collective, or never
            one.event(EventKind.EVENT_WAIT, subject=3, a=1)
            one.event(EventKind.EVENT_WAIT, subject=9, a=1)
            one.event(EventKind.STREAM_SYNC)
        one.call("all_reduce", group=("nccl", names[1]))
    assert bool(hangs(job)) == (wait not in ("none", "another event"))


def exchange(elements: int, receive_first: bool = False, grouped: bool = False) -> list[Rank]:
    job = ranks(2)
    for one in job:
        if grouped:
            one.event(EventKind.GROUP_BEGIN)
        for op in ("recv", "send") if receive_first else ("send", "recv"):
            one.call(op, elements, peer=1 - one.rank)
        if grouped:
            one.event(EventKind.GROUP_END)
    return job


def test_both_send_first() -> None:
    assert hangs(exchange(2**20)) == []  # 4 MiB: NCCL buffers it
    assert "in send to rank 1 of 1,048,577 Float" in the_hang(exchange(2**20 + 1))
    assert "in recv from rank 1" in the_hang(exchange(1, receive_first=True))
    assert hangs(exchange(2**24, grouped=True)) == []
    assert hangs(exchange(2**24, receive_first=True, grouped=True)) == []


def test_a_group_waits_for_all_its_calls() -> None:
    a, b, c = job = ranks(3)
    a.event(EventKind.GROUP_BEGIN)
    a.call("recv", peer=1)
    a.call("recv", peer=2)
    a.event(EventKind.GROUP_END)
    a.call("send", peer=1)
    b.call("send", peer=0)
    b.call("recv", peer=0)
    b.call("all_reduce", among=(1, 2), group=("nccl", "pair"))
    c.call("all_reduce", among=(1, 2), group=("nccl", "pair"))
    c.call("send", peer=0)
    (hang,) = hangs(job)
    assert hang.ranks == (0, 1, 2)
    assert "in recv from rank 2" in str(hang)  # not from rank 1, whose message has arrived


# ---- in words ----


def test_ranks_are_abbreviated() -> None:
    assert abbreviated(range(8)) == "0-7"
    assert abbreviated((0, 1, 2, 4, 5, 6, 7)) == "0-2, 4-7"
    assert abbreviated(range(0, 64, 8)) == "0, 8, 16, …"


def test_the_programs_own_frames_are_shown() -> None:
    own = [Frame("/home/me/train.py", line, "main") for line in range(9)]
    library = Frame("/venv/lib/python3.12/site-packages/lightning/trainer.py", 1, "fit")
    assert frames_of_interest((*own, library, TORCH)) == tuple(own[-6:])
    assert frames_of_interest((library, TORCH)) == (library,)
    assert frames_of_interest((TORCH,)) == (TORCH,)


# ---- whole programs ----


def random_program(choose: random.Random) -> list[Rank]:
    """A program that runs to its end, because its ranks do everything together in the same order."""
    size = choose.choice((2, 4, 6))
    job = ranks(size)
    groups = [(("nccl", "world"), tuple(range(size))), (("gloo", "host"), tuple(range(size)))]
    groups += [(("nccl", f"part{n}"), tuple(sorted(choose.sample(range(size), 2)))) for n in range(3)]
    for _ in range(choose.randrange(1, 40)):
        group, among = choose.choice(groups)
        kind = choose.choice(("collective", "asynchronous", "coalesced", "message", "ring", "sync", "step"))
        elements = choose.choice((1, 1024, 2**22))
        op = choose.choice(({"op": "all_reduce"}, {"op": "broadcast", "peer": among[0]}, {"op": "all_to_all"}))
        options = {"group": group, "among": among, "elements": elements * len(among)}
        if kind == "message":
            source, destination = choose.sample(among, 2)
            job[source].call("send", peer=destination, **options)
            job[destination].call("recv", peer=source, stream=choose.choice((MAIN, SIDE)), **options)
            continue
        for place, rank in enumerate(among):
            one = job[rank]
            if kind == "collective":
                one.call(**op, **options)
            elif kind == "asynchronous":
                number = len(one.events)
                one.event(EventKind.EVENT_RECORD, subject=1, a=number, stream=MAIN)
                one.event(EventKind.EVENT_WAIT, subject=1, a=number, stream=SIDE)
                one.call(**op, **options, stream=SIDE)
                one.event(EventKind.EVENT_RECORD, subject=2, a=number, stream=SIDE)
                if choose.random() < 0.5:
                    one.event(
                        choose.choice((EventKind.EVENT_WAIT, EventKind.EVENT_SYNC)), subject=2, a=number, stream=MAIN
                    )
            elif kind == "coalesced" and group[0] == "nccl":
                one.event(EventKind.GROUP_BEGIN, stream=SIDE)
                one.call(**op, **options, stream=SIDE)
                one.call("all_reduce", **options, stream=SIDE)
                one.event(EventKind.GROUP_END, stream=SIDE)
            elif kind == "ring":
                one.event(EventKind.GROUP_BEGIN)
                one.call("send", peer=among[(place + 1) % len(among)], **options)
                one.call("recv", peer=among[place - 1], **options)
                one.event(EventKind.GROUP_END)
            elif kind == "sync":
                one.event(
                    choose.choice((EventKind.STREAM_SYNC, EventKind.DEVICE_SYNC)), stream=choose.choice((MAIN, SIDE))
                )
        if kind == "step":
            for one in job:
                one.step()
    return job


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_program_that_runs_has_no_hang_until_a_call_is_lost(choose: random.Random) -> None:
    traces = [one.trace("stopped") for one in random_program(choose)]
    traces = choose.sample(traces, choose.randrange(1, len(traces) + 1))
    job = collate(traces)
    assert find_hangs(job) == []
    shared = [
        (rank, event)
        for meet in job.rendezvous
        if len(meet.members) > 1
        for column, rank in enumerate(meet.members)
        for event in meet.events[:, column].tolist()
    ]
    if shared:
        rank, event = choose.choice(shared)
        trace = job.ranks[rank]
        lost = replace(trace, events=np.delete(trace.events, event))
        assert find_hangs(collate([lost if one is trace else one for one in job.ranks.values()]))


def test_a_large_job() -> None:
    """Eight ranks with 300,000 events each, of which a tenth are collectives and as many are records and waits."""
    traces = []
    for one in ranks(8):
        for _ in range(10):
            one.event(EventKind.EVENT_RECORD, subject=1, a=1)
            one.event(EventKind.EVENT_WAIT, subject=1, a=1, stream=SIDE)
            one.call("all_reduce", stream=SIDE)
            one.event(EventKind.EVENT_RECORD, subject=2, a=1, stream=SIDE)
            one.event(EventKind.EVENT_WAIT, subject=2, a=1)
        one.call("send", peer=(one.rank + 1) % 8)
        one.call("recv", peer=(one.rank - 1) % 8)
        for _ in range(48):
            one.event(EventKind.OP)
        trace = one.trace()
        traces.append(replace(trace, events=np.tile(trace.events, 3000)))
    job = collate(traces)
    assert len(job.ranks[0].events) == 300_000
    assert job.rendezvous[0].events.shape == (30_000, 8)
    assert find_hangs(job) == []
