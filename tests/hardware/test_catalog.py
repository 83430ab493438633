"""The shipped catalog is complete, has sources, is consistent, and is right where mistakes are easy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import maya_core.hardware.catalog as module
from maya_core.errors import MayaError
from maya_core.hardware import toml
from maya_core.hardware.catalog import catalog, default_node, find_gpu, find_network, find_node, gpus
from maya_core.hardware.dtypes import RATES
from maya_core.hardware.models import GPU_FIELDS, NETWORK_FIELDS, NODE_FIELDS, CatalogEntry, Gpu, Network, NodeType

# fmt: off
ASKED_FOR = [
    "v100", "v100-16gb", "v100-pcie", "t4", "a10", "a10g", "a30", "a40", "a100", "a100-40gb", "a100-pcie", "a100-pcie-40gb",
    "a6000", "l4", "l40", "l40s", "rtx-3090", "rtx-4090", "h100", "h100-pcie", "h100-nvl", "h200", "b200", "b300", "gb200",
    "gb300", "rtx-pro-6000",
]
# fmt: on
NAMES = {
    "name",
    "aliases",
    "sources",
    "base",
    "own",
    "driver_name",
    "architecture",
    "description",
    "provider",
    "default",
}


def test_every_gpu_that_people_train_on_is_there() -> None:
    assert sorted(gpus()) == sorted(ASKED_FOR)


@pytest.mark.parametrize(("model", "groups"), [(Gpu, GPU_FIELDS), (NodeType, NODE_FIELDS), (Network, NETWORK_FIELDS)])
def test_every_number_belongs_to_a_group_with_a_source(
    model: type[CatalogEntry], groups: dict[str, tuple[str, ...]]
) -> None:
    grouped = [field for fields in groups.values() for field in fields]
    assert sorted(grouped) == sorted(set(model.model_fields) - NAMES)


def test_every_group_of_every_entry_names_sources_that_exist() -> None:
    known = catalog()
    for entries, groups in ((known.gpus, GPU_FIELDS), (known.nodes, NODE_FIELDS), (known.networks, NETWORK_FIELDS)):
        for entry in entries.values():
            assert set(entry.sources) == set(groups), entry.name
            for ids in entry.sources.values():
                assert ids, entry.name
                assert set(ids) <= set(known.sources), entry.name
    assert all(price.source in known.sources for price in known.prices)


def test_no_source_is_unused_or_defined_twice() -> None:
    known = catalog()
    used = {price.source for price in known.prices}
    for entries in (known.gpus, known.nodes, known.networks):
        used |= {source for entry in entries.values() for ids in entry.sources.values() for source in ids}
    assert used == set(known.sources)
    files = Path(module.__file__).parent.glob("*.toml")
    ids = [source for file in files for source in toml.loads(file.read_text())["sources"]]
    assert len(ids) == len(set(ids))


def test_names_and_aliases_are_unambiguous() -> None:
    for entries in (catalog().gpus, catalog().nodes, catalog().networks):
        names = [name for entry in entries.values() for name in (entry.name, *entry.aliases)]
        assert len(names) == len(set(names))
        assert all(name == module.key(name) for name in names)


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops"),
    [
        ("h100", "bfloat16", 989.4),
        ("h100-pcie", "bfloat16", 756.4),
        ("h100-nvl", "bfloat16", 835.5),
        ("h200", "float8", 1978.9),
        ("b200", "bfloat16", 2250),
        ("b200", "float8", 4500),
        ("b300", "bfloat16", 2250),
        ("b300", "float4", 13500),
        ("b300", "float64", 1.25),
        ("gb200", "bfloat16", 2500),
        ("a100", "bfloat16", 312),
        ("a10", "float16", 125),
        ("a10g", "float16", 70),
        ("l4", "float16", 121),
        ("l40s", "bfloat16", 362),
        ("rtx-3090", "float16", 71),
        ("rtx-4090", "float16", 165.2),
        ("t4", "float16", 65),
        ("v100", "float16", 125),
    ],
)
def test_dense_peaks_with_float32_accumulation(gpu: str, dtype: str, tflops: float) -> None:
    assert find_gpu(gpu).peak_flops[dtype] == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("gpu", "gib", "terabytes_per_s", "watts", "sms"),
    [
        ("h100", 79.18, 3.35, 700, 132),
        ("h100-nvl", 93.10, 3.94, 400, 132),
        ("h200", 139.80, 4.8, 700, 132),
        ("b200", 178.36, 8.0, 1000, 148),
        ("b300", 267.69, 8.0, 1100, 148),
        ("gb200", 184.31, 8.0, 1200, 152),
        ("gb300", 276.50, 8.0, 1400, 152),
        ("a100", 79.18, 2.039, 400, 108),
        ("a100-40gb", 39.39, 1.555, 400, 108),
        ("rtx-pro-6000", 94.97, 1.6, 600, 188),
        ("a10g", 22.06, 0.6, 300, 80),
        ("t4", 14.74, 0.32, 70, 40),
    ],
)
def test_memory_power_and_size(gpu: str, gib: float, terabytes_per_s: float, watts: float, sms: int) -> None:
    found = find_gpu(gpu)
    assert found.memory_bytes / 2**30 == pytest.approx(gib, abs=0.006)
    assert found.memory_bandwidth_bytes_per_s / 1e12 == pytest.approx(terabytes_per_s, rel=0.003)
    assert (found.tdp_w, found.sms) == (watts, sms)
    assert found.power_limit_w == found.tdp_w


def test_dtypes_without_arithmetic_on_a_chip_are_absent() -> None:
    assert "bfloat16" not in find_gpu("v100").peak_flops
    assert "bfloat16" not in find_gpu("t4").peak_flops
    assert "float8" not in find_gpu("a100").peak_flops
    has_float4 = {name for name, gpu in gpus().items() if "float4" in gpu.peak_flops}
    assert has_float4 == {"b200", "b300", "gb200", "gb300", "rtx-pro-6000"}
    for gpu in gpus().values():
        assert list(gpu.peak_flops) == [rate for rate in RATES if rate in gpu.peak_flops]


def test_numbers_of_a_gpu_fit_each_other() -> None:
    for gpu in gpus().values():
        moved = 2 * gpu.memory_clock_mhz * 1e6 * gpu.memory_bus_bits / 8  # two transfers a clock
        assert gpu.memory_bandwidth_bytes_per_s == pytest.approx(moved, rel=0.05), gpu.name
        lanes = 64 if gpu.name.startswith(("v100", "t4", "a100", "a30")) else 128
        arithmetic = gpu.sms * lanes * 2 * gpu.boost_clock_mhz * 1e6
        assert gpu.peak_flops["float32"] == pytest.approx(arithmetic, rel=0.12), gpu.name
        assert gpu.base_clock_mhz is None or gpu.base_clock_mhz < gpu.boost_clock_mhz
        assert bool(gpu.nvlink_links) == bool(gpu.nvlink_bytes_per_s) == bool(gpu.nvlink_generation), gpu.name
        if gpu.nvlink_links:
            link = {2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}[gpu.nvlink_generation]
            slower = 14.0625e9  # the bridges of GA102 boards
            assert gpu.nvlink_bytes_per_s / gpu.nvlink_links in (link, slower), gpu.name


def test_host_links() -> None:
    assert find_gpu("h100").host_link_bytes_per_s == pytest.approx(63e9, rel=0.001)
    assert find_gpu("a100").host_link_bytes_per_s == pytest.approx(31.5e9, rel=0.001)
    assert find_gpu("v100").host_link_bytes_per_s == pytest.approx(15.75e9, rel=0.001)
    assert find_gpu("gb200").host_link_bytes_per_s == 225e9


def test_nodes_fit_their_gpus() -> None:
    for node in catalog().nodes.values():
        gpu = find_gpu(node.gpu)
        if node.topology != "pcie":
            assert gpu.nvlink_bytes_per_s, node.name
        if node.nvls:
            assert node.topology == "nvswitch" and gpu.compute_capability >= (9, 0), node.name
        if node.topology == "nvswitch" and gpu.compute_capability >= (9, 0):
            assert node.nvls, node.name
        assert node.nvlink_domain >= {"nvswitch": node.gpus_per_node, "mesh": 8, "pairs": 2, "pcie": 1}[node.topology]
        assert node.pcie_generation <= gpu.pcie_generation, node.name


def test_at_most_one_default_node_of_a_gpu_and_never_a_clouds() -> None:
    defaults = [node for node in catalog().nodes.values() if node.default]
    assert len({node.gpu for node in defaults}) == len(defaults)
    assert all(node.provider is None for node in defaults)
    assert default_node(find_gpu("h100")).name == "hgx-h100"
    assert default_node(find_gpu("t4")).name == "pcie-box"


@pytest.mark.parametrize(
    ("node", "gpu", "count", "gigabits", "network"),
    [
        ("p5.48xlarge", "h100", 8, 3200, "efa-v2"),
        ("p5en.48xlarge", "h200", 8, 3200, "efa-v3"),
        ("p4d.24xlarge", "a100-40gb", 8, 400, "efa-v1"),
        ("p6-b300.48xlarge", "b300", 8, 6400, "efa-v4"),
        ("a3-highgpu-8g", "h100", 8, 800, "gcp-tcpx"),
        ("a3-megagpu-8g", "h100", 8, 1600, "gcp-tcpxo"),
        ("a3-ultragpu-8g", "h200", 8, 3200, "gcp-rdma"),
        ("Standard_ND96isr_H100_v5", "h100", 8, 3200, "infiniband-ndr"),
        ("nd96asr-v4", "a100-40gb", 8, 1600, "infiniband-hdr"),
        ("gb200-nvl72", "gb200", 4, 1600, "infiniband-ndr"),
        ("dgx-h100", "h100", 8, 3200, "infiniband-ndr"),
    ],
)
def test_nodes_as_their_makers_describe_them(node: str, gpu: str, count: int, gigabits: float, network: str) -> None:
    found = find_node(node)
    assert (found.gpu, found.gpus_per_node, found.network) == (gpu, count, network)
    port = found.nic_bytes_per_s or find_network(network).bytes_per_s
    assert found.nics * port * 8 / 1e9 == pytest.approx(gigabits)


def test_prices_are_dated_placed_and_after_the_cut_of_2025() -> None:
    prices = {(price.provider, price.node or price.gpu): price for price in catalog().prices}
    assert len(prices) == len(catalog().prices)
    for price in catalog().prices:
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", price.date)
        assert price.region
        if price.node is not None:
            assert find_node(price.node).provider == price.provider
    assert prices["aws", "p5.48xlarge"].usd_per_hour == 55.04
    assert prices["aws", "p4d.24xlarge"].usd_per_hour == pytest.approx(21.96, abs=0.01)
    assert prices["azure", "nd96isr-h100-v5"].usd_per_hour == 98.32
    assert prices["runpod", "h100"].usd_per_hour == 3.29


def test_networks() -> None:
    assert find_network("NDR").bytes_per_s == 50e9
    assert find_network("infiniband").name == "infiniband-ndr"
    assert find_network("efa-v2").latency_s == pytest.approx(75e-6)
    assert not find_network("gcp-tcpx").rdma
    assert all(0.5 <= network.efficiency <= 0.95 for network in catalog().networks.values())


def test_names_as_people_write_them() -> None:
    assert find_gpu("RTX 4090").name == "rtx-4090"
    assert find_gpu("H100_SXM").name == "h100"
    assert find_node("P5.48xlarge").name == "p5.48xlarge"


def test_a_name_that_is_not_known_gets_the_closest_one() -> None:
    with pytest.raises(MayaError, match="unknown GPU 'h10O'") as error:
        find_gpu("h10O")
    assert "Did you mean 'h100'?" in error.value.advice
    with pytest.raises(MayaError, match=r"unknown node type 'p5\.48xl'") as error:
        find_node("p5.48xl")
    assert "Did you mean 'p5.48xlarge'?" in error.value.advice
    with pytest.raises(MayaError, match="unknown network 'infiniband-nrd'") as error:
        find_network("infiniband-nrd")
    assert "Did you mean 'infiniband-ndr'?" in error.value.advice
