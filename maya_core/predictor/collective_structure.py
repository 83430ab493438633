"""The structural model of collectives: NCCL's algorithms and protocols over links, with coefficients from a profile.

NCCL has several algorithms and protocols for an op; the fastest is assumed to run. The time of each consists of a start, a time for each hop,
and the bytes on its busiest link divided by a share of that link's rate. Every candidate grows with bytes and with ranks, and so does the
fastest. A fitted correction over log2 of bytes and of ranks (within an island) or islands (across the network) is applied on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from maya_core.hardware.cluster import Cluster
from maya_core.predictor.lattice import Lattice, StoredLattice
from maya_core.predictor.placement import Link, Placement, inside_bytes_per_s, outside_bytes_per_s

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")  # ops with models of their own

SHARPNESS = 8  # how sharp the transition is from one slowest link to another
TREE_HOP = 3.0  # a level of a tree, up and down, in hops of a ring
INSIDE_SHARE: dict[Link, float] = {
    "nvlink": 0.8,
    "pcie": 0.4,
}  # shares of the link's rate for a ring that also leaves the island


def wire_share(op: str, ranks: Any) -> Any:
    """The share of the buffer that the busiest link carries in one direction."""
    if op == "send_recv":
        return np.ones_like(np.asarray(ranks, float))
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


class Regime(BaseModel):
    """One algorithm with one protocol within an island."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["ring", "nvls"]
    base_us: float
    hop_us: float
    share: float  # of the link's rate


class InsideStructure(BaseModel):
    """Within an island, over NVLink or PCIe."""

    model_config = ConfigDict(extra="forbid")

    regimes: list[Regime]
    own: float = 0.0  # the cost of a rank's own part, which is copied and not sent, relative to another's

    def seconds(self, op: str, rate: Any, nbytes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        best = np.full(np.broadcast(nbytes, ranks).shape, np.inf)
        levels = np.log2(np.maximum(ranks, 1))
        for regime in self.regimes:
            if regime.kind == "nvls":  # switches reduce and broadcast, so a GPU's link carries the buffer once
                hops, wire = levels, nbytes
            else:
                hops, wire = ranks - 1, nbytes * (wire_share(op, ranks) + self.own / ranks)
                if op == "all_reduce":
                    hops = np.minimum(hops, TREE_HOP * levels)
            time = (regime.base_us + regime.hop_us * hops) * 1e-6 + wire / (rate * regime.share)
            best = np.minimum(best, time)
        return best


@dataclass(frozen=True)
class Route:
    """The numbers of a placement that crosses the network; arrays if there are several."""

    ranks: Any
    islands: Any
    largest: Any
    smallest: Any
    inside: Any  # bytes per second of a ring within an island
    outside: Any  # bytes per second that NCCL reaches on the group's ports in an island, by the catalog
    latency: Any  # seconds

    @staticmethod
    def of(placement: Placement, cluster: Cluster, *, siblings: bool = True) -> Route:
        return Route(
            ranks=float(placement.ranks),
            islands=float(placement.islands),
            largest=float(placement.largest),
            smallest=float(placement.smallest),
            inside=inside_bytes_per_s(placement, cluster) * INSIDE_SHARE[placement.link],
            outside=outside_bytes_per_s(placement, cluster, siblings=siblings) * cluster.network.efficiency,
            latency=cluster.network.latency_s,
        )

    def over(self, islands: np.ndarray) -> Route:
        """This route with other numbers of islands that are as full as these."""
        return Route(
            islands * self.ranks / self.islands, islands, self.largest, self.smallest,
            self.inside, self.outside, self.latency,
        )  # fmt: skip


class Crossing(BaseModel):
    """One algorithm with one protocol across the network."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["ring", "tree", "messages"]
    base_us: float
    hop: float  # in multiples of the network's latency
    inside_us: float  # of a hop within an island
    share: float  # of the rate that NCCL reaches on the ports, by the catalog


class OutsideStructure(BaseModel):
    """Across the network: the slower of the network and the links within islands decides."""

    model_config = ConfigDict(extra="forbid")

    crossings: list[Crossing]
    congestion: float = 0.0  # the share falls with this power of the number of islands

    def seconds(self, op: str, route: Route, nbytes: np.ndarray) -> np.ndarray:
        best = np.full(np.broadcast(nbytes, route.ranks).shape, np.inf)
        for crossing in self.crossings:
            hops, inner, within, across = link_work(op, crossing.kind, route)
            carried = crossing.share * route.outside * (route.islands / 2) ** -self.congestion
            pace = ((within / route.inside) ** SHARPNESS + (across / carried) ** SHARPNESS) ** (1 / SHARPNESS)
            start = (crossing.base_us + crossing.inside_us * inner) * 1e-6 + crossing.hop * route.latency * hops
            best = np.minimum(best, start + nbytes * pace)
        return best


def link_work(op: str, kind: str, route: Route) -> tuple[Any, Any, Any, Any]:
    """The hops over the network and within islands, and the shares of the buffer on a GPU's link and on an island's ports."""
    n, k = route.ranks, route.islands
    if op == "send_recv":
        return 1.0, 0.0, 0.0, 1.0
    if op == "all_to_all":  # ranks in the emptiest island send most to other islands, each over its part of the ports
        return n - route.smallest, route.largest - 1, (route.largest - 1) / n, (n - route.smallest) / n * route.smallest
    rounds = 2.0 if op == "all_reduce" else 1.0
    share = wire_share(op, n)
    if kind == "tree":
        return rounds * np.log2(k), rounds * (route.largest - 1), share, share
    return rounds * (k - 1), rounds * (n - k), share, share


class InsideModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    structure: InsideStructure
    correction: StoredLattice  # over bytes and ranks


class OutsideModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    structure: OutsideStructure
    correction: StoredLattice | None = None  # over bytes and islands; None: fitted to other networks only
    architectures: list[str] = []  # of the GPUs it was measured with
    islands: dict[int, tuple[int, int]] = {}  # the fewest and most that were measured, by ranks per island


class Inside:
    """A fitted model within an island."""

    def __init__(self, stored: InsideModel | dict[str, Any]) -> None:
        self.model = stored if isinstance(stored, InsideModel) else InsideModel.model_validate(stored)
        self.correction = Lattice.load(self.model.correction)

    def seconds(self, op: str, rate: Any, nbytes: np.ndarray, ranks: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns seconds, and whether measurements surround them."""
        ranks = np.broadcast_to(np.asarray(ranks, float), nbytes.shape)
        factor, near = self.correction(nbytes, ranks)
        return self.model.structure.seconds(op, rate, nbytes, ranks) * factor, near


class Outside:
    """A fitted model across the network."""

    def __init__(self, stored: OutsideModel | dict[str, Any]) -> None:
        self.model = stored if isinstance(stored, OutsideModel) else OutsideModel.model_validate(stored)
        self.correction = Lattice.load(self.model.correction) if self.model.correction else None

    def seconds(
        self, op: str, route: Route, nbytes: np.ndarray, *, corrected: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns seconds, and whether measurements surround them; from structure alone unless `corrected`."""
        time = self.model.structure.seconds(op, route, nbytes)
        if self.correction is None or not corrected:
            return time, np.zeros(time.shape, bool)
        factor, near = self.correction(nbytes, np.broadcast_to(route.islands, nbytes.shape))
        return time * factor, near
