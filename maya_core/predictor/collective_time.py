"""How long collectives and messages between GPUs take, as NCCL runs them.

    group = place(range(16), machine)                       # where the ranks of a group sit in a cluster
    predict("all_reduce", [64 << 20], group, machine)       # Durations, one for each size
    seconds(ops, sizes, groups, machine)                    # of a batch of calls

Bytes are of the whole buffer, as nccl-tests count them: what all_gather gives, what reduce_scatter takes, what a rank has for
all in all_to_all, what the root holds in gather and scatter, otherwise the tensor; `buffer_bytes` reads them off a trace's
call. `collective_structure` says what algorithms cost, profiles what coefficients they have on which GPU and network.
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

# Ops of a trace, and whose model tells of them. NCCL's broadcast and reduce are rings like those of all_gather and
# reduce_scatter; gather and scatter are messages, as all_to_all is; a barrier is an all_reduce of one element.
TOLD_BY = {
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
LIKENED = ("broadcast", "reduce", "gather", "scatter")  # that were not measured themselves
# Every byte passes every rank, where the ring of all_gather keeps a rank's own part at home, which costs so much of another's.
WHOLE, OWN_PART = ("broadcast", "reduce"), 0.35
NOTHING_ALONE = ("all_reduce", "broadcast", "reduce", "barrier")  # with one rank; the others copy
STANDS_IN = {"reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}  # where only the other was measured
BARRIER_BYTES = 4.0
COPY_US, COPY_SHARE = 1.5, 0.8  # of a copy within a GPU's memory: start, and share of its bandwidth

OCTAVES = 42  # of smaller calls that one is compared with: down to a byte
POOR_LENDERS = ("l40s",)  # measured in a box whose PCIe is unlike others'


def predict(op: str, nbytes: Any, placement: Placement, cluster: Cluster, *, siblings: bool = True) -> Durations:
    """Durations of calls of one op on one group, for each of `nbytes`.

    `siblings`: whether the other ranks of the group's nodes talk over the network at the same time, as groups of
    data-parallel ranks beside tensor parallelism do. It matters to groups that do not have all of a node's ranks.
    """
    if op not in TOLD_BY:
        raise MayaError(f"'{op}' is not a collective Maya knows.", f"It knows {', '.join(TOLD_BY)}.")
    sizes = np.maximum(np.atleast_1d(np.asarray(nbytes, np.float64)), 0)
    if op == "barrier":
        sizes = np.full_like(sizes, BARRIER_BYTES)
    if placement.ranks == 1:
        return _alone(op, sizes, cluster.gpu)
    asked = np.maximum(sizes, 1)
    if op in WHOLE:
        asked = asked * placement.ranks / (placement.ranks - 1 + OWN_PART)
    time, known, name = _answer(TOLD_BY[op], asked, placement, cluster, siblings)
    if op in LIKENED:
        known = np.maximum(known, Provenance.EXTRAPOLATED)
    return Durations.of(np.where(sizes == 0, 0.0, time), known, name)


def seconds(
    ops: Sequence[str], nbytes: Any, placements: Sequence[Placement], cluster: Cluster, *, siblings: bool = True
) -> Durations:
    """Durations of a batch of calls, each with its op, bytes and placement."""
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
    """With one rank there is nobody to talk to: at most a copy from one buffer to the other."""
    copy = COPY_US * 1e-6 + 2 * sizes / (gpu.memory_bandwidth_bytes_per_s * COPY_SHARE)
    time = np.zeros_like(sizes) if op in NOTHING_ALONE else np.where(sizes == 0, 0.0, copy)
    return Durations.of(time, Provenance.EXTRAPOLATED, FAMILY)


Answer = tuple[np.ndarray, np.ndarray, str]


def _answer(op: str, sizes: np.ndarray, placement: Placement, cluster: Cluster, siblings: bool) -> Answer:
    """A call takes at least as long as those of half its bytes, a quarter and so on. Fits see to that where they were made;
    coefficients lent to another link or another number of islands are kept to it here."""
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
    return np.where(near, np.uint8(Provenance.INTERPOLATED), np.uint8(Provenance.EXTRAPOLATED))


def roofline(
    op: str, sizes: np.ndarray, placement: Placement, cluster: Cluster, *, siblings: bool = True
) -> np.ndarray:
    """Bytes on the busiest link over what the data sheet gives it: no op of TOLD_BY's values is faster by rings or messages."""
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
    own: bool  # measured on this very GPU or network, and of this very op


def find_inside(gpu: Gpu, link: Link, op: str, topology: Topology) -> FoundModel | None:
    """The model of an op within an island: the GPU's own, else its nearest relative's on the same kind of link, of those
    in a like node if there are any."""

    def unlike(name: str) -> tuple[bool, bool, float, str]:
        other = find_gpu(name)
        return name != gpu.name, _reach(default_node(other).topology) != _reach(topology), distance(gpu, other), name

    for told in (op, STANDS_IN.get(op, op)):
        key = f"{link} {told}"
        known = [name for name, profile in shipped(FAMILY).items() if key in profile.models and name in gpus()]
        lenders = [name for name in known if name == gpu.name or name not in POOR_LENDERS]
        if lenders:
            name = min(lenders, key=unlike)
            return FoundModel(name, key, name == gpu.name and told == op)
    return None


def _reach(topology: Topology) -> str:
    return "all" if topology in ("nvswitch", "mesh") else topology


def find_outside(network: Network, op: str, *, racks: bool = False) -> FoundModel | None:
    """The model of an op across a network: its own, else that of its kind at the nearest rate, else InfiniBand's.

    `racks`: between NVLink domains of several nodes, where those were measured.
    """
    known = catalog().networks
    keys = [f"racks {op}"] * racks + [f"network {told}" for told in (op, STANDS_IN.get(op, op))]
    for key in keys:
        lenders = [name for name, profile in shipped(FAMILY).items() if key in profile.models and name in known]
        if lenders:
            name = min(lenders, key=lambda name: (name != network.name, *_unlike(network, known[name]), name))
            return FoundModel(name, key, name == network.name and key.endswith(f" {op}"))
    return None


def _unlike(one: Network, other: Network) -> tuple[int, float]:
    """Of the same kind first, then InfiniBand, of which most is known; among those by rate."""
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


# What a trace says


def buffer_bytes(call: CollectiveCall, communicator: Communicator, cluster: Cluster) -> float:
    """The bytes to predict a traced call by."""
    item = item_bytes(call.dtype)
    given, got = call.elements_in * item, call.elements_out * item
    if call.splits_in or call.splits_out:
        sides = (call.splits_in, call.splits_out)
        parts = [np.array(side, np.float64) * item for side in sides if side]
        return max(even_bytes(side, communicator.ranks, communicator.rank, cluster) for side in parts)
    if call.op == "gather":  # only the root sees all of it
        return float(max(got, given * len(communicator.ranks)))
    if call.op == "scatter":
        return float(max(given, got * len(communicator.ranks)))
    return float(max(given, got))


def even_bytes(parts: np.ndarray, ranks: Sequence[int], me: int, cluster: Cluster) -> float:
    """The buffer of an even all_to_all that takes as long as one with these bytes for (or from) each rank of the group.

    It is the one whose busiest link carries as much: the rank's part of the ports where islands are left, or its own link.
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
    """Of messages that a rank starts together (batch_isend_irecv), each a peer's global rank and bytes.

    Directions go on at once, and so do NVLink and network; what shares a link and a direction adds up.
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
