"""Predicts the duration of collectives and messages between GPUs, as NCCL runs them.

    group = place(range(16), machine)                       # where the ranks of a group are in a cluster
    predict("all_reduce", [64 << 20], group, machine)       # Durations, one for each size
    seconds(ops, sizes, groups, machine)                    # Durations of a batch of calls

Bytes are those of the whole buffer, as in nccl-tests: the output of all_gather, the input of reduce_scatter, what a rank sends to all ranks in
all_to_all, what the root holds in gather and scatter, and otherwise the tensor. `buffer_bytes` computes them for a call of a trace.
`collective_structure` models the algorithms; profiles have the coefficients for each GPU and network.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maya_core.errors import MayaError
from maya_core.hardware.catalog import Gpu, catalog, default_node, find_gpu, gpus
from maya_core.hardware.cluster import Cluster
from maya_core.hardware.dtypes import item_bytes
from maya_core.hardware.models import Network, Topology
from maya_core.predictor.collective_structure import Inside, Outside, Route, link_work, wire_share
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.placement import (
    Link,
    Placement,
    inside_bytes_per_s,
    island_of,
    island_size,
    outside_bytes_per_s,
    place,
)
from maya_core.predictor.profile import distance, shipped
from maya_core.trace.communication import CollectiveCall, Communicator

FAMILY = "collectives"

# Ops of a trace, and the op whose model predicts them. NCCL's broadcast and reduce are rings like those of all_gather and
# reduce_scatter; gather and scatter consist of messages, as all_to_all does; a barrier is an all_reduce of one element.
MODEL_OF = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "all_gather",
    "reduce": "reduce_scatter",
    "gather": "all_to_all",
    "scatter": "all_to_all",
    "barrier": "all_reduce",
    "send": "send_recv",
    "recv": "send_recv",
}
LIKENED = ("broadcast", "reduce", "gather", "scatter")  # ops that were not measured themselves
# In these, every byte passes every rank. In the ring of all_gather, a rank's own part stays in place and costs this share of another's.
WHOLE, OWN_PART = ("broadcast", "reduce"), 0.35
NOTHING_ALONE = ("all_reduce", "broadcast", "reduce", "barrier")  # with one rank, these do nothing; the others copy
STANDS_IN = {"reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}  # if only the other one was measured
BARRIER_BYTES = 4.0
COPY_US, COPY_SHARE = 1.5, 0.8  # a copy within a GPU's memory: its start, and its share of the bandwidth

OCTAVES = 42  # of smaller sizes with which a call is compared: down to a byte
POOR_LENDERS = ("l40s",)  # measured in a box whose PCIe is unlike that of others


def predict(op: str, nbytes: Any, placement: Placement, cluster: Cluster, *, siblings: bool = True) -> Durations:
    """The durations of calls of one op on one group, for each of `nbytes`.

    `siblings`: whether the other ranks of the group's nodes use the network at the same time, as data-parallel groups do that are combined
    with tensor parallelism. It matters to groups that do not have all ranks of a node.
    """
    if op not in MODEL_OF:
        raise MayaError(f"unknown collective '{op}'.", f"Maya predicts {', '.join(MODEL_OF)}.")
    sizes = np.maximum(np.atleast_1d(np.asarray(nbytes, np.float64)), 0)
    if op == "barrier":
        sizes = np.full_like(sizes, BARRIER_BYTES)
    if placement.ranks == 1:
        return _alone(op, sizes, cluster.gpu)
    effective = np.maximum(sizes, 1)
    if op in WHOLE:
        effective = effective * placement.ranks / (placement.ranks - 1 + OWN_PART)
    time, known, name = _answer(MODEL_OF[op], effective, placement, cluster, siblings)
    if op in LIKENED:
        known = np.maximum(known, Provenance.EXTRAPOLATED)
    return Durations.of(np.where(sizes == 0, 0.0, time), known, name)


def seconds(
    ops: Sequence[str], nbytes: Any, placements: Sequence[Placement], cluster: Cluster, *, siblings: bool = True
) -> Durations:
    """The durations of a batch of calls, each with its op, bytes and placement."""
    sizes = np.asarray(nbytes, np.float64)
    groups: dict[tuple[str, Placement], list[int]] = {}
    for index, key in enumerate(zip(ops, placements, strict=True)):
        groups.setdefault(key, []).append(index)
    time, known, profile = np.zeros(len(sizes)), np.zeros(len(sizes), np.uint8), np.zeros(len(sizes), np.int32)
    names: dict[str, int] = {}
    for (op, placement), indices in groups.items():
        found = predict(op, sizes[indices], placement, cluster, siblings=siblings)
        time[indices], known[indices] = found.seconds, found.provenance
        profile[indices] = names.setdefault(found.profiles[0], len(names))
    return Durations(time, known, profile, tuple(names))


def _alone(op: str, sizes: np.ndarray, gpu: Gpu) -> Durations:
    """With one rank there is no communication, and at most a copy from one buffer to the other."""
    copy = COPY_US * 1e-6 + 2 * sizes / (gpu.memory_bandwidth_bytes_per_s * COPY_SHARE)
    time = np.zeros_like(sizes) if op in NOTHING_ALONE else np.where(sizes == 0, 0.0, copy)
    return Durations.of(time, Provenance.EXTRAPOLATED, FAMILY)


Answer = tuple[np.ndarray, np.ndarray, str]


def _answer(op: str, sizes: np.ndarray, placement: Placement, cluster: Cluster, siblings: bool) -> Answer:
    """A call takes at least as long as calls with half its bytes, a quarter and so on. Fits ensure that for their own system; here it is
    enforced for coefficients that are applied to another link or number of islands."""
    octaves = 2.0 ** -np.arange(OCTAVES)[:, None] * sizes
    flat = np.maximum(octaves.ravel(), 1)
    if placement.islands == 1:
        time, known, name = _within(op, flat, placement, cluster)
    else:
        time, known, name = _across(op, flat, placement, cluster, siblings)
    return time.reshape(octaves.shape).max(axis=0), known[: len(sizes)], name


def _within(op: str, sizes: np.ndarray, placement: Placement, cluster: Cluster) -> Answer:
    found = find_inside(cluster.gpu, placement.link, op, cluster.topology)
    if found is None:
        return _bound(op, sizes, placement, cluster, True)
    model = _inside(found.name, found.key)
    time, near = model.seconds(op, inside_bytes_per_s(placement, cluster), sizes, placement.ranks)
    return time, _known(near & found.own), f"{FAMILY}/{found.name}"


def _across(op: str, sizes: np.ndarray, placement: Placement, cluster: Cluster, siblings: bool) -> Answer:
    found = find_outside(cluster.network, op, racks=island_size(cluster) > cluster.gpus_per_node)
    if found is None:
        return _bound(op, sizes, placement, cluster, siblings)
    model = _outside(found.name, found.key)
    route = Route.of(placement, cluster, siblings=siblings)
    like = (
        placement.even
        and placement.largest in model.model.islands
        and cluster.gpu.architecture in model.model.architectures
    )
    time, near = model.seconds(op, route, sizes, corrected=found.own and like)
    fewest, most = model.model.islands.get(placement.largest, (0, 0))
    return time, _known(near & (fewest <= placement.islands <= most)), f"{FAMILY}/{found.name}"


def _known(near: np.ndarray) -> np.ndarray:
    known: np.ndarray = np.where(near, np.uint8(Provenance.INTERPOLATED), np.uint8(Provenance.EXTRAPOLATED))
    return known


def roofline(
    op: str, sizes: np.ndarray, placement: Placement, cluster: Cluster, *, siblings: bool = True
) -> np.ndarray:
    """The bytes on the busiest link divided by its data sheet rate: no ring or message is faster."""
    inside = inside_bytes_per_s(placement, cluster)
    if placement.islands == 1:
        seconds: np.ndarray = sizes * wire_share(op, float(placement.ranks)) / inside
        return seconds
    _, _, within, across = link_work(op, "ring", Route.of(placement, cluster))
    seconds = sizes * max(within / inside, across / outside_bytes_per_s(placement, cluster, siblings=siblings))
    return seconds


def _bound(op: str, sizes: np.ndarray, placement: Placement, cluster: Cluster, siblings: bool) -> Answer:
    time = roofline(op, sizes, placement, cluster, siblings=siblings)
    if placement.islands > 1:
        time = time + cluster.network.latency_s
    return time, np.full(sizes.shape, Provenance.BOUND, np.uint8), f"{FAMILY}/data sheet"


# Which profile


@dataclass(frozen=True)
class FoundModel:
    name: str  # of the profile
    key: str  # of the model in it
    own: bool  # measured on this GPU or network, and for this op


def find_inside(gpu: Gpu, link: Link, op: str, topology: Topology) -> FoundModel | None:
    """The model of an op within an island: the GPU's own, otherwise that of its nearest relative with the same kind of link, preferably in a
    similar node."""

    def unlike(name: str) -> tuple[bool, bool, float, str]:
        other = find_gpu(name)
        return name != gpu.name, _reach(default_node(other).topology) != _reach(topology), distance(gpu, other), name

    for model_op in (op, STANDS_IN.get(op, op)):
        key = f"{link} {model_op}"
        known = [name for name, profile in shipped(FAMILY).items() if key in profile.models and name in gpus()]
        lenders = [name for name in known if name == gpu.name or name not in POOR_LENDERS]
        if lenders:
            name = min(lenders, key=unlike)
            return FoundModel(name, key, name == gpu.name and model_op == op)
    return None


def _reach(topology: Topology) -> str:
    return "all" if topology in ("nvswitch", "mesh") else topology


def find_outside(network: Network, op: str, *, racks: bool = False) -> FoundModel | None:
    """The model of an op across a network: its own, otherwise that of the same kind with the nearest rate, otherwise InfiniBand's.

    `racks`: between NVLink domains of several nodes, if those were measured.
    """
    known = catalog().networks
    keys = [f"racks {op}"] * racks + [f"network {model_op}" for model_op in (op, STANDS_IN.get(op, op))]
    for key in keys:
        lenders = [name for name, profile in shipped(FAMILY).items() if key in profile.models and name in known]
        if lenders:
            name = min(lenders, key=lambda name: (name != network.name, *_unlike(network, known[name]), name))
            return FoundModel(name, key, name == network.name and key.endswith(f" {op}"))
    return None


def _unlike(one: Network, other: Network) -> tuple[int, float]:
    """Sorts networks of the same kind first, then InfiniBand, for which there are most measurements; then by rate."""
    kind, lent = one.name.split("-")[0], other.name.split("-")[0]
    return (0 if kind == lent else 1 if lent == "infiniband" else 2), abs(
        float(np.log2(one.bytes_per_s / other.bytes_per_s))
    )


@functools.cache
def _inside(name: str, key: str) -> Inside:
    return Inside(shipped(FAMILY)[name].models[key])


@functools.cache
def _outside(name: str, key: str) -> Outside:
    return Outside(shipped(FAMILY)[name].models[key])


# Calls of a trace


def buffer_bytes(call: CollectiveCall, communicator: Communicator, cluster: Cluster) -> float:
    """The buffer size with which a call of a trace is predicted."""
    item = item_bytes(call.dtype)
    given, got = call.elements_in * item, call.elements_out * item
    if call.splits_in or call.splits_out:
        sides = (call.splits_in, call.splits_out)
        parts = [np.array(side, np.float64) * item for side in sides if side]
        return max(even_bytes(side, communicator.ranks, communicator.rank, cluster) for side in parts)
    if call.op == "gather":  # only the root has all of it
        return float(max(got, given * len(communicator.ranks)))
    if call.op == "scatter":
        return float(max(given, got * len(communicator.ranks)))
    return float(max(given, got))


def even_bytes(parts: np.ndarray, ranks: Sequence[int], me: int, cluster: Cluster) -> float:
    """The buffer of an even all_to_all that takes as long as one with these bytes for (or from) each rank of the group.

    Its busiest link carries as many bytes: the rank's part of the ports if data leaves the island, or the rank's own link.
    """
    n = len(ranks)
    home = island_of(ranks[me], cluster)
    near = np.array([island_of(rank, cluster) == home for rank in ranks])
    others = np.arange(n) != me
    inside, abroad = float(parts[near & others].sum()), float(parts[~near].sum())
    if near.all():
        return inside * n / max(n - 1, 1)
    placement = place(ranks, cluster)
    port = outside_bytes_per_s(placement, cluster) / placement.smallest
    link = inside_bytes_per_s(placement, cluster)
    return max(abroad, inside * min(1.0, port / link)) * n / (n - int(near.sum()))


def batch_seconds(
    sends: Iterable[tuple[int, float]],
    receives: Iterable[tuple[int, float]],
    rank: int,
    cluster: Cluster,
    *,
    siblings: bool = True,
) -> float:
    """The duration of messages that a rank starts together (batch_isend_irecv), each given by the peer's global rank and bytes.

    Both directions run at the same time, and so do NVLink and network; messages that share a link and a direction add up.
    """
    longest = 0.0
    for messages in (sends, receives):
        totals: dict[Placement, float] = {}
        for peer, nbytes in messages:
            where = place(sorted({rank, peer}), cluster)
            totals[where] = totals.get(where, 0.0) + nbytes
        for where, total in totals.items():
            longest = max(longest, float(predict("send", total, where, cluster, siblings=siblings).seconds[0]))
    return longest
