"""The simulator gives timelines that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from programs import LARGE, MS, REPLAY, Rank, ends, play, starts

from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.cluster import cluster
from maya_core.hardware.host_costs import CALL_S, DISPATCH_S, LAUNCH_S, Host
from maya_core.report.analysis import Analysis
from maya_core.report.breakdown import rank_time
from maya_core.request import PredictionOptions
from maya_core.simulator.clock import QUEUE
from maya_core.simulator.contention import NVLINK_CHANNELS, TRAFFIC
from maya_core.trace.job import collate
from maya_core.trace.schema import EventKind, Phase


def times_of(*ranks: Rank, host: Host = Host.MEASURED):
    """The analysis, and the time of each rank's step by kind."""
    timeline = play(*ranks, host=host)
    job = collate([rank.trace() for rank in ranks])
    machine = cluster("a100", min(8, ranks[0].world), -(-ranks[0].world // 8))
    analysis = Analysis(job, machine, PredictionOptions(), {rank.rank: rank.durations() for rank in ranks}, timeline)
    return analysis, [rank_time(analysis, each) for each in timeline.ranks.values()]


# ---- streams and events ----
def test_work_on_one_stream_follows_on() -> None:
    timeline = play(Rank().compute(3).compute(4)).ranks[0]
    assert starts(timeline) == [0, 3]
    assert ends(timeline) == [3, 7]


def test_two_streams_with_an_event() -> None:
    """B waits for A's event. C runs beside B, and each has half of the GPU until C is done."""
    rank = Rank().compute(10).record(7).wait(7, stream=1).compute(5, stream=1).compute(4, stream=0)
    timeline = play(rank).ranks[0]
    assert starts(timeline) == [0, 10, 10]
    assert ends(timeline) == [10, 19, 18]


def test_an_event_recorded_again_is_another() -> None:
    """The wait is for the first version, and not for the second, though the handle is the same."""
    rank = Rank().compute(2).record(7, 1).compute(50).record(7, 2).wait(7, 1, stream=1).copy_in(1, stream=1)
    assert starts(play(rank).ranks[0]) == [0, 2, 2]


def test_an_event_that_a_graph_records_anew_is_waited_for_anew() -> None:
    rank = Rank()
    for _ in range(2):
        rank.compute(10).record(7, 1).wait(7, 1, stream=1).copy_in(1, stream=1)
    assert starts(play(rank).ranks[0]) == [0, 10, 10, 20]


def test_an_event_that_was_never_recorded_is_not_waited_for() -> None:
    rank = Rank().wait(9, stream=1).compute(1, stream=1).host_waits(9).compute(1)
    assert starts(play(rank).ranks[0]) == [0, 0]


def test_the_host_waits_for_an_event_a_stream_and_the_device() -> None:
    def host_goes_on(rank: Rank) -> float:
        return starts(play(rank.compute(1, stream=2)).ranks[0])[-1]

    assert host_goes_on(Rank().compute(5).record(1).compute(6).host_waits(1)) == 5
    assert host_goes_on(Rank().compute(5).copy_in(9, stream=1).sync(stream=0)) == 5
    assert host_goes_on(Rank().compute(5).copy_in(9, stream=1).sync()) == 9
    assert host_goes_on(Rank().host(3).sync().host(4)) == 7


# ---- copies ----
def test_copies_in_one_direction_take_turns() -> None:
    timeline = play(Rank().copy_in(4, stream=1).copy_in(4, stream=2).compute(5)).ranks[0]
    assert ends(timeline) == [4, 8, 5]


# ---- communication and compute ----
def backward(overlapped: bool) -> Rank:
    """The backward of two layers; the gradients of the first are reduced at the same time, or after both."""
    rank = Rank(world=8).compute(10).record(1)
    if not overlapped:
        rank.compute(10).record(1, 2).wait(1, 2, stream=1)
    else:
        rank.wait(1, stream=1)
    rank.collective(4)
    if overlapped:
        rank.compute(10)
    return rank.record(2, stream=1).wait(2, stream=0).compute(1).step()


def test_an_all_reduce_hidden_behind_backward() -> None:
    _, (time,) = times_of(backward(overlapped=True))
    gpu, moved = find_gpu("a100"), 4 * LARGE  # bytes, in the four milliseconds beside it
    lost = 4 * (NVLINK_CHANNELS / gpu.sms + TRAFFIC * moved / (4 * MS) / gpu.memory_bandwidth_bytes_per_s)
    assert time.step_time_s == pytest.approx((10 + 10 + lost + 1) * MS)
    assert time.exposed_communication_s == pytest.approx(0)
    assert time.hidden_communication_s == pytest.approx(4 * MS)
    assert time.slowed_s == pytest.approx(lost * MS)


def test_an_all_reduce_that_is_not_hidden() -> None:
    _, (time,) = times_of(backward(overlapped=False))
    assert time.step_time_s == pytest.approx((10 + 10 + 4 + 1) * MS)
    assert time.exposed_communication_s == pytest.approx(4 * MS)
    assert time.hidden_communication_s == pytest.approx(0)
    assert time.slowed_s == pytest.approx(0)


def test_collectives_of_one_communicator_take_turns_whatever_their_streams() -> None:
    timeline = play(Rank(world=8).collective(4, stream=1).collective(3, stream=2).collective(2, stream=1)).ranks[0]
    assert ends(timeline) == [4, 7, 9]


def test_collectives_of_two_communicators_share_the_link() -> None:
    rank = Rank(world=8).collective(4, stream=1).collective(6, stream=2, group="1")
    assert ends(play(rank).ranks[0]) == [8, 10]


def test_a_straggler_holds_the_others_up() -> None:
    ranks = [
        Rank(0, 8).compute(10).record(1).wait(1, stream=1).collective(2).step(),
        Rank(3, 8).compute(15).record(1).wait(1, stream=1).collective(2).step(),
    ]
    _, (fast, slow) = times_of(*ranks)
    assert fast.step_time_s == slow.step_time_s == pytest.approx(17 * MS)
    assert fast.waiting_s == pytest.approx(5 * MS)
    assert slow.waiting_s == pytest.approx(0)
    assert fast.exposed_communication_s == slow.exposed_communication_s == pytest.approx(2 * MS)


# ---- messages ----
def test_a_large_message_waits_for_its_receiver_and_a_small_one_leaves() -> None:
    large = play(Rank(0, 2).send(1, 2).compute(1, stream=1), Rank(1, 2).compute(9, stream=1).receive(0, 2))
    assert ends(large.ranks[0]) == [11, 12]
    small = play(
        Rank(0, 2).send(1, 2, elements=8).compute(1, stream=1),
        Rank(1, 2).compute(9, stream=1).receive(0, 2, elements=8),
    )
    assert ends(small.ranks[0]) == [2, 3]
    assert ends(small.ranks[1]) == [9, 11]


def test_messages_of_a_group_go_both_ways_at_once() -> None:
    """Each rank's first message meets the other's second: one after the other, they would wait forever."""

    def one(rank: int) -> Rank:
        other = 1 - rank
        made = Rank(rank, 2).group(begin=True).send(other, 3).receive(other, 3).group(begin=False)
        return made

    timeline = play(one(0), one(1))
    assert len(timeline.ranks[0].on_device()) == 1  # one launch
    assert ends(timeline.ranks[0]) == ends(timeline.ranks[1])
    with pytest.raises(MayaError, match="the job hangs"):
        play(Rank(0, 2).send(1, 3).receive(1, 3), Rank(1, 2).send(0, 3).receive(0, 3))


def pipeline(stage: int, stages: int, batches: int, forward: float, back: float) -> Rank:
    """One stage of 1F1B. Messages cost nothing, so that only the bubble is lost."""
    rank = Rank(stage, stages)

    def go(milliseconds: float, source: int, to: int) -> None:
        if 0 <= source < stages:
            rank.receive(source, 0, stream=0)
        rank.compute(milliseconds)
        if 0 <= to < stages:
            rank.send(to, 0, stream=0, elements=8)

    warm_up = min(stages - stage - 1, batches)
    for _ in range(warm_up):
        go(forward, stage - 1, stage + 1)
    for _ in range(batches - warm_up):
        go(forward, stage - 1, stage + 1)
        go(back, stage + 1, stage - 1)
    for _ in range(warm_up):
        go(back, stage + 1, stage - 1)
    return rank.collective(0, stream=0, elements=1).step()


@pytest.mark.parametrize(("batches", "forward", "back"), [(4, 1.0, 2.0), (8, 1.0, 1.0), (16, 0.5, 1.5)])
def test_the_bubble_of_a_pipeline(batches: int, forward: float, back: float) -> None:
    stages = 4
    analysis, times = times_of(*(pipeline(stage, stages, batches, forward, back) for stage in range(stages)))
    whole = (batches + stages - 1) * (forward + back) * MS
    assert analysis.step_time_s == pytest.approx(whole)
    bubble = (stages - 1) / (batches + stages - 1)
    for time in times:
        assert time.waiting_s / time.step_time_s == pytest.approx(bubble, abs=1e-9)
        assert time.compute_s == pytest.approx(batches * (forward + back) * MS)


# ---- the host ----
def test_a_host_bound_loop_of_tiny_kernels() -> None:
    """The GPU is done with each kernel long before the next one comes."""
    rank, loops = Rank(), 500
    for _ in range(loops):
        rank.compute(2e-3)
    _, (time,) = times_of(rank.step(), host=Host.MODELLED)
    each = DISPATCH_S["FORWARD"] + LAUNCH_S
    assert each > 2e-6
    assert time.step_time_s == pytest.approx(loops * each + 2e-6)
    assert time.compute_s == pytest.approx(loops * 2e-6)
    assert time.host_s == pytest.approx(loops * (each - 2e-6) + 2e-6, rel=1e-6)


def test_large_kernels_hide_the_host() -> None:
    rank = Rank()
    for _ in range(20):
        rank.compute(1)
    _, (time,) = times_of(rank.step(), host=Host.MODELLED)
    assert time.step_time_s == pytest.approx(20 * MS, rel=1e-3)


def test_backward_and_a_graph_cost_the_host_less() -> None:
    def host_time(rank: Rank) -> float:
        return float(play(rank, host=Host.MODELLED).ranks[0].issued[-1])

    one = DISPATCH_S["BACKWARD"] + LAUNCH_S
    assert host_time(Rank().compute(1, phase=Phase.BACKWARD)) == pytest.approx(one)
    replayed = Rank()
    replayed._row(EventKind.GRAPH_LAUNCH)
    for _ in range(100):
        replayed.compute(1, flags=REPLAY)
    assert host_time(replayed) == pytest.approx(CALL_S["GRAPH_LAUNCH"])


@pytest.mark.parametrize("host", Host)
def test_an_optimizer_on_the_host_takes_its_share_of_the_nodes_memory(host: Host) -> None:
    """28 bytes per parameter in 0.25 ns for the whole node are 112 GB/s, of which each of eight ranks has 14."""
    timeline = play(Rank().compute(5).host_work(1.4).compute(1), host=host).ranks[0]
    assert starts(timeline)[-1] - starts(timeline)[0] == pytest.approx(100, abs=0.05)


def test_a_collective_of_host_data_holds_the_hosts() -> None:
    ranks = [
        Rank(0, 2).host(1).collective(3, host=True).compute(1),
        Rank(1, 2).host(6).collective(3, host=True).compute(1),
    ]
    timeline = play(*ranks)
    assert starts(timeline.ranks[0]) == starts(timeline.ranks[1]) == [9]


# ---- steps ----
def test_the_first_step_warms_up() -> None:
    rank = Rank().compute(50).step()
    for _ in range(3):
        rank.compute(10).step()
    analysis, (time,) = times_of(rank)
    assert analysis.step_time_s == time.step_time_s == pytest.approx(10 * MS)
    assert analysis.timeline is not None
    np.testing.assert_allclose(analysis.timeline.step_ends, [50 * MS, 60 * MS, 70 * MS, 80 * MS])


def test_a_steps_parts_add_up() -> None:
    rank = (
        Rank(world=8)
        .host(2)
        .copy_in(3)
        .compute(4, stream=0)
        .record(1)
        .wait(1, stream=1)
        .collective(5)
        .record(2, stream=1)
    )
    rank.wait(2).compute(1).step()
    _, (time,) = times_of(rank)
    parts = (time.compute_s, time.exposed_communication_s, time.waiting_s, time.copy_s, time.host_s)
    assert sum(parts) == pytest.approx(time.step_time_s)
    assert parts == pytest.approx((5 * MS, 5 * MS, 0, 3 * MS, 2 * MS), abs=1e-9)


def test_the_host_waits_where_a_stream_has_taken_all_it_can() -> None:
    rank = Rank()
    for _ in range(QUEUE + 10):
        rank.compute(1)
    timeline = play(rank).ranks[0]
    assert (timeline.issued[:QUEUE] == 0).all()
    np.testing.assert_allclose(timeline.issued[QUEUE:], np.arange(1, 11) * MS)
    assert ends(timeline)[-1] == QUEUE + 10


def test_the_end_of_a_wait_is_told() -> None:
    timeline = play(Rank().compute(5).sync().compute(1)).ranks[0]
    assert (timeline.issued[1], timeline.over[1]) == (0, pytest.approx(5 * MS))


def test_a_group_costs_its_host_one_launch() -> None:
    rank = Rank(world=8).group(begin=True)
    for _ in range(10):
        rank.collective(1)
    timeline = play(rank.group(begin=False), host=Host.MODELLED).ranks[0]
    assert timeline.issued[-1] == pytest.approx(CALL_S["GROUP_END"])


def test_waiting_for_one_communicator_does_not_hold_up_another() -> None:
    """The second and fourth of four calls are on Y; the fourth does not wait for the third, which waits for X."""
    rank = Rank(world=8)
    for milliseconds, stream, group in ((50, 1, "X"), (1, 2, "Y"), (1, 2, "X"), (1, 3, "Y")):
        rank.collective(milliseconds, stream=stream, group=group, op="all_gather")
    timeline = play(rank).ranks[0]
    assert starts(timeline)[-1] < 10
