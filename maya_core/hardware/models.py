"""The models of the hardware catalog: GPUs, kinds of node, networks, prices, and the sources of every number.

They define what an entry must contain; `catalog` reads the entries, and `cluster` combines them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from maya_core.hardware.dtypes import RATES
from maya_core.hardware.units import Flops, Rate, RateOrNone, Seconds, Size

Architecture = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell"]
Topology = Literal["nvswitch", "mesh", "pairs", "pcie"]

# Groups of fields that share a source, by the group's name in `sources`.
GPU_FIELDS = {
    "peaks": ("peak_flops",),
    "memory_size": ("memory_bytes",),
    "outside": ("outside_bytes",),
    "memory": ("memory_kind", "memory_bandwidth_bytes_per_s", "memory_clock_mhz", "memory_bus_bits"),
    "chip": ("sms", "l2_bytes", "boost_clock_mhz", "base_clock_mhz"),
    "limits": ("compute_capability", "max_threads_per_sm", "shared_memory_per_block_bytes"),
    "power": ("tdp_w", "power_limit_w"),
    "links": (
        "pcie_generation", "pcie_lanes", "host_link_bytes_per_s", "nvlink_generation", "nvlink_links", "nvlink_bytes_per_s",
    ),
    "copy_engines": ("copy_engines",),
}  # fmt: skip
NODE_FIELDS = {
    "gpus": ("gpu", "gpus_per_node", "topology", "nvlink_domain", "nvlink_bytes_per_s", "nvls"),
    "network": ("network", "nics", "nic_bytes_per_s"),
    "host": ("vcpus", "ram_bytes", "pcie_generation", "pcie_lanes"),
}
NETWORK_FIELDS = {"rate": ("bytes_per_s", "rdma"), "latency": ("latency_s",), "efficiency": ("efficiency",)}

# One lane in one direction, after line coding: 8b/10b before generation 3, 128b/130b from generation 3, FLIT in generation 6.
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.9846e9, 4: 1.9692e9, 5: 3.9385e9, 6: 7.5625e9}
PcieGeneration = Annotated[int, Field(ge=1, le=6)]


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """The rate of a PCIe link in one direction."""
    return _PCIE_LANE[generation] * lanes


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


SourceIds = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class Source(BaseModel):
    """A source of numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    publisher: str
    year: int
    gives: str


class CatalogEntry(BaseModel):
    """The fields that GPUs, nodes and networks have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    aliases: tuple[str, ...] = ()
    sources: dict[str, SourceIds] = {}  # by group of fields; empty for the user's own entries
    base: str | None = None  # the catalog's entry from which the user derived it
    own: tuple[str, ...] = ()  # fields that come from the user's file


class Gpu(CatalogEntry):
    """One kind of GPU, as its data sheet and its driver describe it."""

    driver_name: str
    architecture: Architecture
    compute_capability: tuple[int, int]
    memory_bytes: Size
    outside_bytes: Size
    memory_kind: str
    memory_bandwidth_bytes_per_s: Rate
    memory_clock_mhz: PositiveFloat
    memory_bus_bits: PositiveInt
    sms: PositiveInt
    l2_bytes: Size
    boost_clock_mhz: PositiveFloat
    base_clock_mhz: PositiveFloat | None = None  # None: not published
    max_threads_per_sm: PositiveInt
    shared_memory_per_block_bytes: Size
    peak_flops: dict[str, Flops]  # dense, by one of RATES; a dtype that the chip does not compute with is missing
    tdp_w: PositiveFloat
    power_limit_w: PositiveFloat
    pcie_generation: PcieGeneration
    pcie_lanes: PositiveInt = 16
    host_link_bytes_per_s: Rate  # one direction; PCIe if nothing else is given
    nvlink_generation: int = Field(0, ge=0)  # 0: the GPU has none
    nvlink_links: int = Field(0, ge=0)
    nvlink_bytes_per_s: RateOrNone = 0.0  # over all links, one direction
    copy_engines: PositiveInt

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        filled = dict(entry)
        if "tdp_w" in entry:
            filled.setdefault("power_limit_w", entry["tdp_w"])
        generation, lanes = entry.get("pcie_generation"), entry.get("pcie_lanes", 16)
        if generation in _PCIE_LANE and isinstance(lanes, int):
            filled.setdefault("host_link_bytes_per_s", pcie_bytes_per_s(generation, lanes))
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Gpu:
        if unknown := [rate for rate in self.peak_flops if rate not in RATES]:
            raise ValueError(f"peak_flops has no '{unknown[0]}': it is by {', '.join(RATES)}")
        if "float32" not in self.peak_flops:
            raise ValueError("peak_flops must have float32")
        if self.outside_bytes >= self.memory_bytes:
            raise ValueError(f"outside_bytes must be less than memory_bytes ({self.memory_bytes})")
        return self

    @property
    def training_peak(self) -> float:
        """The dense peak of the 16-bit type that training uses on this GPU."""
        peaks = self.peak_flops
        return peaks.get("bfloat16") or peaks.get("float16") or peaks["float32"]


class Network(CatalogEntry):
    """One kind of network port between nodes, and how well NCCL uses it."""

    description: str = ""
    bytes_per_s: Rate
    latency_s: Seconds
    rdma: bool
    efficiency: Annotated[float, Field(gt=0, le=1)]


class NodeType(CatalogEntry):
    """One kind of node."""

    description: str = ""
    provider: str | None = None  # the cloud that offers it
    default: bool = False  # used for its GPU if no node is named
    gpu: str
    gpus_per_node: PositiveInt
    topology: Topology
    nvlink_domain: PositiveInt
    nvls: bool = False
    nvlink_bytes_per_s: RateOrNone | None = None  # None: that of the GPU
    network: str
    nics: PositiveInt
    nic_bytes_per_s: Rate | None = None  # None: that of the network
    vcpus: PositiveInt
    ram_bytes: Size
    pcie_generation: PcieGeneration
    pcie_lanes: PositiveInt = 16


class Price(BaseModel):
    """The price of a node or a GPU per hour, at a provider, in a region, on a date."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str | None = None
    gpu: str | None = None
    provider: str
    region: str = ""
    usd_per_hour: PositiveFloat
    date: str = ""
    source: str = ""  # empty: the user's own price

    @model_validator(mode="after")
    def _one_of(self) -> Price:
        if (self.node is None) == (self.gpu is None):
            raise ValueError("a price is for a `node` or for a `gpu`: give one of them")
        return self

    @property
    def own(self) -> bool:
        return not self.source
