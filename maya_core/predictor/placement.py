"""The placement of a group's ranks in one or several NVLink domains or nodes, and the network rate that they have there.

Ranks fill nodes in order, as launchers place them. An island is what a group reaches without the network: a node, or with NVL72 racks the whole
NVLink domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from maya_core.errors import MayaError
from maya_core.hardware.cluster import Cluster

Link = Literal["nvlink", "pcie"]


@dataclass(frozen=True)
class Placement:
    ranks: int
    islands: int
    largest: int  # ranks in the fullest island
    smallest: int  # ranks in the emptiest island that has any
    link: Link  # between ranks of an island

    @property
    def even(self) -> bool:
        return self.largest == self.smallest


def place(ranks: Sequence[int], cluster: Cluster) -> Placement:
    """The placement of these global ranks of a job on the cluster."""
    if not ranks or min(ranks) < 0 or max(ranks) >= cluster.gpus:
        raise MayaError(
            f"ranks {min(ranks, default=0)} to {max(ranks, default=0)} do not fit on a cluster of {cluster.gpus} GPUs.",
            "Give the cluster as many nodes as the job has.",
        )
    size = island_size(cluster)
    counts = Counter(rank // size for rank in ranks).values()
    return Placement(len(ranks), len(counts), max(counts), min(counts), _link(ranks, cluster))


def island_of(rank: int, cluster: Cluster) -> int:
    return rank // island_size(cluster)


def island_size(cluster: Cluster) -> int:
    """The number of GPUs that reach each other without the network."""
    return max(cluster.gpus_per_node, cluster.nvlink_domain)


def _link(ranks: Sequence[int], cluster: Cluster) -> Link:
    if cluster.topology == "pcie" or cluster.nvlink_bytes_per_s == 0:
        return "pcie"
    if cluster.topology == "pairs":
        size = island_size(cluster)
        pairs = {rank // 2 for rank in ranks}
        return "nvlink" if len(pairs) == len({rank // size for rank in ranks}) else "pcie"
    return "nvlink"


def inside_bytes_per_s(placement: Placement, cluster: Cluster) -> float:
    """The data sheet's rate between a GPU and others of its island, in one direction."""
    return cluster.nvlink_bytes_per_s if placement.link == "nvlink" else cluster.pcie_bytes_per_s


def outside_bytes_per_s(placement: Placement, cluster: Cluster, *, siblings: bool = True) -> float:
    """The raw rate of the group's ports in the island where it has fewest.

    If `siblings` (groups of the island's other ranks) are busy, each rank has its own share of the ports. Otherwise a rank has at least a whole
    port, but not the ports of other GPUs.
    """
    per_rank = cluster.nics_per_node / cluster.gpus_per_node
    ports = per_rank * placement.smallest
    if not siblings:
        of_island = per_rank * island_size(cluster)
        ports = min(of_island, max(per_rank, 1.0) * placement.smallest)
    return ports * cluster.nic_bytes_per_s
