"""Turns a user's description of a cluster ("32 H100 in nodes of 8") into the numbers from which communication and cost are predicted."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from maya_core.errors import MayaError
from maya_core.hardware.catalog import catalog, default_node, find_gpu, find_network, find_node
from maya_core.hardware.models import Gpu, Network, NodeType, Price, Topology, pcie_bytes_per_s


class Quote(BaseModel):
    """What a cluster or GPU costs in an hour, and the price that this is computed from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    usd_per_hour: PositiveFloat
    price: Price


class Cluster(BaseModel):
    """Nodes of one kind, connected by a network. Rates are in bytes per second and in one direction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: Gpu
    gpus_per_node: PositiveInt
    nodes: PositiveInt
    node: NodeType
    network: Network
    nic_bytes_per_s: PositiveFloat
    price_per_gpu_hour: PositiveFloat | None = None  # given by the user; takes precedence over all price lists

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def topology(self) -> Topology:
        """How the GPUs of a node are connected."""
        return self.node.topology

    @property
    def nvlink_bytes_per_s(self) -> float:
        """The rate of one GPU over all its NVLinks; 0 if the node has none."""
        if self.topology == "pcie":
            return 0.0
        given = self.node.nvlink_bytes_per_s
        return self.gpu.nvlink_bytes_per_s if given is None else given

    @property
    def nvlink_domain(self) -> int:
        """How many of the job's GPUs are connected by NVLink; 1 if there is none."""
        spans_nodes = self.node.nvlink_domain > self.node.gpus_per_node
        return min(self.node.nvlink_domain, self.gpus if spans_nodes else self.gpus_per_node)

    @property
    def nvls(self) -> bool:
        """Whether the NVSwitches perform reductions."""
        return self.node.nvls and self.nvlink_domain > 1

    @property
    def nics_per_node(self) -> int:
        """The network ports of the GPUs in use: a job on half of a node's GPUs uses half of its ports."""
        return max(1, self.node.nics * self.gpus_per_node // self.node.gpus_per_node)

    @property
    def pcie_bytes_per_s(self) -> float:
        """The rate of a GPU's PCIe link, which is that of the slower end."""
        return min(
            pcie_bytes_per_s(self.gpu.pcie_generation, self.gpu.pcie_lanes),
            pcie_bytes_per_s(self.node.pcie_generation, self.node.pcie_lanes),
        )

    @property
    def host_bytes_per_s(self) -> float:
        """The rate between a GPU and its host: PCIe, or what the GPU has instead (NVLink-C2C)."""
        over_pcie = pcie_bytes_per_s(self.gpu.pcie_generation, self.gpu.pcie_lanes)
        own = self.gpu.host_link_bytes_per_s
        return min(own, self.pcie_bytes_per_s) if own <= over_pcie else own

    def quotes(self, provider: str | None = None) -> list[Quote]:
        """The cost of the cluster per hour by every matching price: the user's own prices first, then from the cheapest.

        A cloud's node is rented as a whole. A plain board (hgx-h100) is priced as GPUs by the hour, and as cloud nodes with at
        least as many of the same GPU.
        """
        found = []
        for price in catalog().prices:
            if provider is not None and price.provider != provider.strip().lower():
                continue
            if price.node is not None and self._is_like(find_node(price.node)):
                found.append(Quote(usd_per_hour=price.usd_per_hour * self.nodes, price=price))
            elif self._is_of(price.gpu) and (price.own or self.node.provider is None):
                found.append(Quote(usd_per_hour=price.usd_per_hour * self.gpus, price=price))
        return sorted(found, key=lambda quote: (not quote.price.own, quote.usd_per_hour))

    def price_per_hour(self, provider: str | None = None) -> float | None:
        """US dollars per hour for the whole cluster: from `price_per_gpu_hour` if it is given, otherwise the first of `quotes`."""
        if self.price_per_gpu_hour is not None:
            return self.price_per_gpu_hour * self.gpus
        quotes = self.quotes(provider)
        return quotes[0].usd_per_hour if quotes else None

    def _is_of(self, gpu: str | None) -> bool:
        return gpu is not None and gpu in (self.gpu.name, self.gpu.base)

    def _is_like(self, other: NodeType) -> bool:
        if other.name == self.node.name:
            return True
        return self.node.provider is None and self._is_of(other.gpu) and other.gpus_per_node >= self.gpus_per_node


def cluster(
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    nodes: int = 1,
    *,
    node: str | None = None,
    network: str | None = None,
    price_per_gpu_hour: float | None = None,
) -> Cluster:
    """The cluster with this GPU or kind of node, and with the usual network of that node unless another is named.

    cluster("h100", 8, nodes=4)          # HGX H100 boards on InfiniBand NDR
    cluster(node="p5.48xlarge", nodes=4)
    cluster("h100", 8, nodes=4, network="roce-400")
    """
    if gpu is None and node is None:
        raise MayaError("a cluster needs a GPU or a kind of node.", "Give gpu='h100' or node='hgx-h100'.")
    if nodes < 1 or (gpus_per_node is not None and gpus_per_node < 1):
        raise MayaError(
            f"a cluster of {nodes} nodes with {gpus_per_node} GPUs each is not possible.", "Give numbers of at least 1."
        )
    kind = find_node(node) if node is not None else _node_for(find_gpu(gpu or ""), gpus_per_node)
    board = find_gpu(gpu if gpu is not None else kind.gpu)
    count = kind.gpus_per_node if gpus_per_node is None else gpus_per_node
    takes_any = kind.topology == "pcie" and kind.provider is None
    if not takes_any and kind.gpu not in (board.name, board.base):
        raise MayaError(
            f"{kind.name} has {kind.gpu} GPUs, not {board.name}.",
            "Give only one of the two; `maya help hardware` describes how to add a node of your own.",
        )
    if count > kind.gpus_per_node:
        raise MayaError(
            f"{kind.name} has {kind.gpus_per_node} GPUs, not {count}.",
            "Give more nodes with fewer GPUs each; `maya help hardware` describes how to add a node of your own.",
        )
    wire = find_network(network if network is not None else kind.network)
    rate = kind.nic_bytes_per_s if network is None and kind.nic_bytes_per_s is not None else wire.bytes_per_s
    return Cluster(
        gpu=board,
        gpus_per_node=count,
        nodes=nodes,
        node=kind,
        network=wire,
        nic_bytes_per_s=rate,
        price_per_gpu_hour=price_per_gpu_hour,
    )


def _node_for(gpu: Gpu, count: int | None) -> NodeType:
    """The GPU's default node, or the smallest other node with at least `count` of these GPUs."""
    usual = default_node(gpu)
    larger = [
        node
        for node in catalog().nodes.values()
        if count is not None and node.gpu in (gpu.name, gpu.base) and node.gpus_per_node >= count
    ]
    if count is None or count <= usual.gpus_per_node or not larger:
        return usual
    return min(larger, key=lambda node: node.gpus_per_node)


def gpu_hour_quotes(gpu: Gpu) -> list[Quote]:
    """The cost of one such GPU per hour by every known price: the user's own prices first, then from the cheapest. The price of a node
    is divided by its number of GPUs."""
    found = []
    for price in catalog().prices:
        if price.gpu == gpu.name:
            found.append(Quote(usd_per_hour=price.usd_per_hour, price=price))
        elif price.node is not None and (kind := find_node(price.node)).gpu == gpu.name:
            found.append(Quote(usd_per_hour=price.usd_per_hour / kind.gpus_per_node, price=price))
    return sorted(found, key=lambda quote: (not quote.price.own, quote.usd_per_hour))
