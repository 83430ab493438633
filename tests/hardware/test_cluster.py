"""A user's description of a cluster gives the numbers from which collectives and cost are predicted."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from maya_core.errors import MayaError
from maya_core.hardware.catalog import default_node, gpus
from maya_core.hardware.cluster import cluster


def test_32_h100() -> None:
    found = cluster("h100", gpus_per_node=8, nodes=4)
    assert (found.gpus, found.nodes, found.gpus_per_node) == (32, 4, 8)
    assert found.node.name == "hgx-h100"
    assert (found.topology, found.nvls, found.nvlink_domain) == ("nvswitch", True, 8)
    assert found.nvlink_bytes_per_s == 450e9
    assert (found.nics_per_node, found.nic_bytes_per_s, found.network.name) == (8, 50e9, "infiniband-ndr")
    assert found.pcie_bytes_per_s == found.host_bytes_per_s == pytest.approx(63e9, rel=0.001)


def test_a_part_of_a_node_has_a_part_of_its_ports() -> None:
    found = cluster("h100", gpus_per_node=2)
    assert (found.nics_per_node, found.nvlink_domain, found.nvls) == (2, 2, True)
    alone = cluster("h100", gpus_per_node=1)
    assert (alone.nics_per_node, alone.nvlink_domain, alone.nvls) == (1, 1, False)


def test_a_clouds_node() -> None:
    found = cluster(node="p5.48xlarge", nodes=2)
    assert (found.gpu.name, found.gpus_per_node) == ("h100", 8)
    assert (found.nics_per_node, found.nic_bytes_per_s, found.network.name) == (32, 12.5e9, "efa-v2")
    slower_port = cluster(node="g5.12xlarge")
    assert slower_port.nic_bytes_per_s == 5e9


def test_an_nvlink_domain_goes_beyond_the_node() -> None:
    assert cluster("gb200", nodes=1).nvlink_domain == 4
    assert cluster("gb200", nodes=9).nvlink_domain == 36
    rack = cluster("gb200", nodes=36)
    assert (rack.gpus, rack.nvlink_domain) == (144, 72)
    assert rack.host_bytes_per_s == 225e9
    assert rack.pcie_bytes_per_s == pytest.approx(63e9, rel=0.001)


def test_topologies() -> None:
    v100 = cluster("v100", 8)
    assert (v100.topology, v100.nvlink_bytes_per_s, v100.nvls) == ("mesh", 150e9, False)
    bridged = cluster("h100-pcie", 8)
    assert (bridged.topology, bridged.nvlink_domain, bridged.nvlink_bytes_per_s) == ("pairs", 2, 300e9)
    consumer = cluster("rtx-4090", 4)
    assert (consumer.topology, consumer.nvlink_bytes_per_s, consumer.nvlink_domain) == ("pcie", 0, 1)
    assert cluster("a100", 8).nvls is False
    # a link is as fast as the slower end: PCIe 3 of the GPU in a PCIe 4 box
    assert cluster("t4", 4).pcie_bytes_per_s == pytest.approx(15.75e9, rel=0.001)


def test_a_larger_node_where_the_usual_one_is_too_small() -> None:
    assert cluster("a100-40gb", 16).node.name == "a2-megagpu-16g"
    with pytest.raises(MayaError, match="hgx-h100 has 8 GPUs, not 16"):
        cluster("h100", 16)


def test_another_network() -> None:
    found = cluster("h100", 8, 4, network="roce-400")
    assert (found.network.name, found.nic_bytes_per_s, found.network.rdma) == ("roce-400", 50e9, True)
    assert cluster(node="g5.12xlarge", network="ethernet-25").nic_bytes_per_s == 3.125e9


def test_what_cannot_be() -> None:
    with pytest.raises(MayaError, match=r"p4d\.24xlarge has a100-40gb GPUs, not h100"):
        cluster("h100", node="p4d.24xlarge")
    with pytest.raises(MayaError, match="needs a GPU or a kind of node"):
        cluster()
    with pytest.raises(MayaError, match="0 nodes"):
        cluster("h100", nodes=0)
    assert cluster("l4", node="pcie-box").gpu.name == "l4"  # a plain box takes any board


def test_prices() -> None:
    found = cluster("h100", 8, nodes=4)
    assert found.price_per_hour("aws") == pytest.approx(4 * 55.04)
    assert found.price_per_hour("runpod") == pytest.approx(32 * 3.29)
    assert found.price_per_hour() == pytest.approx(32 * 3.29)  # the cheapest
    assert found.price_per_hour("coreweave") is None
    assert [quote.price.provider for quote in found.quotes()][:3] == ["runpod", "nebius", "lambda"]
    assert found.quotes("aws")[0].price.date == "2026-08"


def test_a_clouds_node_has_its_own_price_and_is_rented_whole() -> None:
    assert cluster(node="p5.48xlarge", gpus_per_node=2).price_per_hour() == pytest.approx(55.04)
    assert cluster(node="p5.48xlarge").price_per_hour("runpod") is None
    assert cluster(node="p5e.48xlarge").price_per_hour() is None
    assert cluster("gb300").price_per_hour() is None


def test_the_users_price_goes_before_all_others() -> None:
    found = cluster("h100", 8, nodes=4, price_per_gpu_hour=2.5)
    assert found.price_per_hour() == found.price_per_hour("aws") == 80


def test_every_gpu_makes_a_cluster() -> None:
    for gpu in gpus().values():
        found = cluster(gpu.name, nodes=2)
        assert found.node == default_node(gpu)
        assert found.pcie_bytes_per_s > 0
        assert found.nic_bytes_per_s > 0
        with pytest.raises(ValidationError):
            found.nodes = 3  # type: ignore[misc]
