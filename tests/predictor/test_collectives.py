"""Collectives: the placement of groups, the effect of links and sharing, and plausible growth of durations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from python_calls import python_calls

from maya_core.errors import MayaError
from maya_core.hardware.cluster import Cluster, cluster
from maya_core.predictor.collective_time import MODEL_OF, batch_seconds, buffer_bytes, even_bytes, predict, seconds
from maya_core.predictor.durations import Provenance
from maya_core.predictor.placement import Placement, outside_bytes_per_s, place
from maya_core.predictor.profile import shipped
from maya_core.trace.communication import CollectiveCall, Communicator

MB, GB = 2**20, 2**30
COLLECTIVES = [op for op in MODEL_OF if op not in ("send", "recv", "barrier")]
GPUS = ["a100", "h100", "h200", "b200", "gb200", "v100", "l40s", "rtx-pro-6000", "rtx-4090", "a100-pcie", "h100-pcie"]
NETWORKS = ["infiniband-ndr", "infiniband-hdr", "slingshot-11", "roce-400", "efa-v2", "ethernet-25"]
SIZES = 2.0 ** np.arange(0, 41)


def time_of(op: str, nbytes: float, ranks, machine: Cluster, **options) -> float:
    return float(predict(op, nbytes, place(list(ranks), machine), machine, **options).seconds[0])


def bus_gb_per_s(machine: Cluster, nbytes: float, ranks) -> float:
    n = len(ranks)
    return 2 * (n - 1) / n * nbytes / time_of("all_reduce", nbytes, ranks, machine) / 1e9


# Placements


def test_groups_are_placed_by_the_node_of_their_ranks() -> None:
    machine = cluster("h100", 8, nodes=4)
    assert place(range(8), machine) == Placement(8, 1, 8, 8, "nvlink")
    assert place(range(0, 32, 8), machine) == Placement(4, 4, 1, 1, "nvlink")
    assert place(range(3, 11), machine) == Placement(8, 2, 5, 3, "nvlink")
    assert place(range(12), machine) == Placement(12, 2, 8, 4, "nvlink")
    with pytest.raises(MayaError, match="32 GPUs"):
        place([0, 32], machine)


def test_an_nvl72_rack_is_one_island() -> None:
    machine = cluster(node="gb200-nvl72", nodes=36)
    assert place(range(72), machine).islands == 1
    assert place(range(144), machine) == Placement(144, 2, 72, 72, "nvlink")


def test_bridged_pairs_reach_each_other_by_nvlink_and_others_by_pcie() -> None:
    machine = cluster("a100-pcie", 8)
    assert place([2, 3], machine).link == "nvlink"
    assert place([1, 2], machine).link == "pcie"
    assert place(range(4), machine).link == "pcie"
    assert time_of("all_reduce", GB, [1, 2], machine) > 3 * time_of("all_reduce", GB, [2, 3], machine)


def test_ports_follow_the_ranks() -> None:
    machine = cluster(node="p4d.24xlarge", nodes=2)  # 4 ports for 8 GPUs
    whole, half, one = (place([*range(g), *range(8, 8 + g)], machine) for g in (8, 4, 1))
    port = machine.nic_bytes_per_s
    assert outside_bytes_per_s(whole, machine) == 4 * port
    assert outside_bytes_per_s(half, machine) == 2 * port
    assert outside_bytes_per_s(one, machine) == port / 2
    assert outside_bytes_per_s(one, machine, siblings=False) == port


# Magnitudes that are public knowledge


@pytest.mark.parametrize(("gpu", "low", "high"), [("a100", 200, 250), ("h100", 420, 500), ("b200", 600, 800)])
def test_eight_gpus_of_a_node_reach_the_bus_bandwidth_they_are_known_for(gpu: str, low: float, high: float) -> None:
    assert low < bus_gb_per_s(cluster(gpu, 8), 512 * MB, range(8)) < high


def test_between_nodes_the_ports_set_the_pace() -> None:
    machine = cluster("h100", 8, nodes=16)
    assert 250 < bus_gb_per_s(machine, 8 * GB, range(128)) < 400
    assert 40 < bus_gb_per_s(machine, 8 * GB, range(0, 128, 8)) < 50  # one port of 400 Gb/s for each rank


def test_nvlink_is_faster_than_the_network() -> None:
    machine = cluster("h100", 8, nodes=2)
    for op in COLLECTIVES:
        for nbytes in (1024, MB, GB):
            assert time_of(op, nbytes, range(8), machine) < time_of(op, nbytes, range(0, 16, 2), machine)
    assert time_of("send", GB, [0, 1], machine) < time_of("send", GB, [0, 8], machine) / 4


def test_busy_siblings_slow_groups_that_share_a_nodes_ports() -> None:
    machine = cluster(node="p4d.24xlarge", nodes=4)
    ranks = range(0, 32, 8)
    for op in ("all_reduce", "all_gather", "all_to_all"):
        alone, shared = (time_of(op, GB, ranks, machine, siblings=busy) for busy in (False, True))
        assert 1.7 * alone < shared < 2.3 * alone
    whole = range(32)
    assert time_of("all_reduce", GB, whole, machine) == time_of("all_reduce", GB, whole, machine, siblings=False)


def test_an_uneven_group_is_held_back_by_its_emptiest_node() -> None:
    machine = cluster("h100", 8, nodes=2)
    even, uneven = [0, 1, 2, 3, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 8]
    assert time_of("all_reduce", GB, uneven, machine) > 2 * time_of("all_reduce", GB, even, machine)


# Provenance


def test_provenance_tells_measured_systems_from_others() -> None:
    machine = cluster("h100", 8, nodes=64)

    def known(op: str, nbytes: float, ranks, where: Cluster = machine) -> tuple[Provenance, str]:
        found = predict(op, nbytes, place(ranks, where), where)
        return Provenance(found.provenance[0]), found.profiles[0]

    assert known("all_reduce", 64 * MB, range(8)) == (Provenance.INTERPOLATED, "collectives/h100")
    assert known("all_reduce", 256 * MB, range(80)) == (Provenance.INTERPOLATED, "collectives/infiniband-ndr")
    assert known("all_reduce", 256 * MB, range(16))[0] == Provenance.EXTRAPOLATED  # two nodes: one rank of each alone
    assert known("all_reduce", 1024, range(80))[0] == Provenance.EXTRAPOLATED
    assert known("all_reduce", 256 * MB, range(12))[0] == Provenance.EXTRAPOLATED
    assert known("broadcast", 64 * MB, range(8))[0] == Provenance.EXTRAPOLATED
    assert known("all_reduce", 64 * MB, range(8), cluster("h200", 8)) == (Provenance.EXTRAPOLATED, "collectives/h100")
    ethernet = cluster("a100", 8, nodes=2, network="ethernet-25")
    assert known("all_reduce", 64 * MB, range(16), ethernet)[0] == Provenance.EXTRAPOLATED


def test_profiles_are_small_and_say_where_they_come_from() -> None:
    assert {"a100", "h100", "b200", "l40s", "infiniband-ndr", "slingshot-11"} <= set(shipped("collectives"))
    for profile in shipped("collectives").values():
        assert profile.sources
        assert profile.held_out
        assert len(profile.model_dump_json()) < 10_000


# Calls of a trace


def test_bytes_of_a_call_are_those_of_the_whole_buffer() -> None:
    machine, group = cluster("h100", 8), Communicator("nccl", "world", tuple(range(8)), 0)

    def nbytes(op: str, given: int, got: int, **more) -> float:
        return buffer_bytes(CollectiveCall(0, op, "BFloat16", given, got, **more), group, machine)

    assert nbytes("all_reduce", 1000, 1000) == 2000
    assert nbytes("all_gather_into_tensor", 1000, 8000) == 16000
    assert nbytes("reduce_scatter_tensor", 8000, 1000) == 16000
    assert nbytes("gather", 1000, 0) == nbytes("gather", 1000, 8000) == 16000
    assert nbytes("scatter", 0, 1000) == 16000
    assert nbytes("send", 1000, 0) == nbytes("recv", 0, 1000) == 2000
    assert nbytes("all_to_all", 8000, 8000, splits_in=(1000,) * 8) == pytest.approx(16000)


def test_an_uneven_exchange_is_worth_an_even_one_with_as_busy_a_link() -> None:
    machine, ranks = cluster("h100", 8, nodes=2), range(16)
    even = np.full(16, float(MB))
    assert even_bytes(even, ranks, 0, machine) == pytest.approx(16 * MB)
    abroad, at_home = even.copy(), even.copy()
    abroad[8] *= 9
    at_home[1] *= 9
    assert even_bytes(abroad, ranks, 0, machine) == pytest.approx(32 * MB)
    assert even_bytes(at_home, ranks, 0, machine) == pytest.approx(16 * MB)


def test_messages_of_a_batch_add_up_on_a_link_and_not_across() -> None:
    machine = cluster("h100", 8, nodes=2)
    one = batch_seconds([(8, GB)], [], 0, machine)
    assert batch_seconds([(8, GB)], [(8, GB)], 0, machine) == one
    assert batch_seconds([(8, GB), (1, GB)], [], 0, machine) == one
    assert batch_seconds([(8, GB), (9, GB)], [], 0, machine) == pytest.approx(2 * one, rel=0.05)
    assert batch_seconds([], [], 0, machine) == 0


def test_a_batch_of_thousands_is_priced_at_once_and_as_each_alone() -> None:
    machine = cluster("h100", 8, nodes=4)
    groups = [place(range(8), machine), place(range(32), machine), place(range(0, 32, 8), machine)]
    ops = [COLLECTIVES[index % len(COLLECTIVES)] for index in range(6000)]
    sizes = np.random.default_rng(0).integers(1, GB, 6000)
    placements = [groups[index % 3] for index in range(6000)]
    found = seconds(ops, sizes, placements, machine)
    few, many = (python_calls(lambda n=n: seconds(ops[:n], sizes[:n], placements[:n], machine)) for n in (60, 6000))
    assert many < 2 * few  # an additional call costs next to nothing
    for index in (0, 17, 5999):
        one = predict(ops[index], sizes[index], placements[index], machine)
        assert found.seconds[index] == one.seconds[0]
        assert found.profiles[found.profile[index]] == one.profiles[0]


# What must hold everywhere


def test_alone_there_is_at_most_a_copy() -> None:
    machine = cluster("h100", 8)
    for op in MODEL_OF:
        assert time_of(op, MB, [0], machine) < 1e-5
    assert time_of("all_reduce", GB, [0], machine) == 0


def test_nothing_to_send_takes_no_time_but_a_barrier_does() -> None:
    machine = cluster("h100", 8, nodes=2)
    for op in COLLECTIVES:
        assert time_of(op, 0, range(16), machine) == 0
    assert 1e-5 < time_of("barrier", 0, range(16), machine) < 1e-3


def test_unknown_ops_are_refused() -> None:
    machine = cluster("h100", 8)
    with pytest.raises(MayaError, match="all_reduce"):
        predict("all_sorts", 1, place([0, 1], machine), machine)


@pytest.mark.parametrize("gpu", GPUS)
def test_more_bytes_take_longer_within_a_node(gpu: str) -> None:
    machine = cluster(gpu)
    for op in MODEL_OF:
        for count in (2, 3, 4):
            spent = predict(op, SIZES, place(range(count), machine), machine).seconds
            assert np.isfinite(spent).all()
            assert (spent > 0).all()
            assert (np.diff(spent) >= 0).all(), (op, count)


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "gb200", "l40s", "rtx-pro-6000", "rtx-4090"])
def test_more_ranks_take_longer_within_an_island(gpu: str) -> None:
    """For the same whole buffer. With switches that reduce, eight ranks are up to a tenth faster than four. Broadcast and reduce pass on every
    byte whatever the number of ranks, so they are not tested."""
    machine = cluster(gpu, nodes=18) if gpu == "gb200" else cluster(gpu)
    counts = [2**power for power in range(1, 7) if 2**power <= max(machine.gpus_per_node, machine.nvlink_domain)]
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        spent = np.array([predict(op, SIZES, place(range(n), machine), machine).seconds for n in counts])
        least = 0.9 if op == "all_reduce" and machine.nvls else 0.995
        assert (spent[1:] >= least * spent[:-1]).all(), op


@given(
    network=st.sampled_from(NETWORKS),
    gpu=st.sampled_from(["a100", "h100", "b200", "l40s"]),
    op=st.sampled_from(COLLECTIVES),
    power=st.integers(1, 10),
    each=st.sampled_from([1, 2, 4, 8]),
    log_bytes=st.floats(0, 40),
    siblings=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_across_nodes_time_grows_with_bytes_and_nodes(network, gpu, op, power, each, log_bytes, siblings) -> None:
    """Twice the bytes never take less; twice the nodes, as full as before, not less by more than a twentieth."""
    machine = cluster(gpu, 8, nodes=2 ** (power + 1), network=network)

    def spent(nodes: int, nbytes: float) -> float:
        group = Placement(nodes * each, nodes, each, each, place([0], machine).link)
        return float(predict(op, nbytes, group, machine, siblings=siblings).seconds[0])

    nbytes = 2.0**log_bytes
    here = spent(2**power, nbytes)
    assert 0 < here < 1e9
    assert spent(2**power, 2 * nbytes) >= here
    assert spent(2 ** (power + 1), nbytes) >= 0.95 * here


@given(ranks=st.sets(st.integers(0, 16383), min_size=2, max_size=64), op=st.sampled_from(COLLECTIVES))
@settings(max_examples=100, deadline=None)
def test_any_group_of_a_large_cluster_has_a_time(ranks, op) -> None:
    machine = cluster("h100", 8, nodes=2048)
    group = place(sorted(ranks), machine)
    assert group.smallest <= group.largest <= 8
    assert group.islands <= group.ranks
    spent = predict(op, [0, 1, MB, 2**40], group, machine).seconds
    assert np.isfinite(spent).all()
    assert spent[0] == 0
    assert (np.diff(spent) >= 0).all()


def test_sixteen_thousand_ranks() -> None:
    machine = cluster("h100", 8, nodes=2048)
    everyone = place(range(16384), machine)
    for op in COLLECTIVES:
        spent = predict(op, [MB, GB, 2**40], everyone, machine).seconds
        assert np.isfinite(spent).all()
        assert (np.diff(spent) > 0).all()
