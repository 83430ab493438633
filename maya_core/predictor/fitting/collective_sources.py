"""Reads measurements of collectives as rows of one form, with the clusters on which they were made."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path as Folder

import numpy as np

from maya_core.hardware.cluster import Cluster, cluster
from maya_core.predictor.fitting.measurements import Table, read_table, where

OPS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "send_recv", "send_recv": "send_recv",
}  # fmt: skip
NCCL_TESTS = "nccl-tests within a node, published with AIConfigurator"
VIDUR = "Vidur: device time of all_reduce and of messages"
LOGS = "nccl-tests logs"

# Systems by GPU. NCCL before 2.27 is excluded, because its all_to_all and all_gather differ.
INSIDE = {
    "a100_sxm": "a100", "h100_sxm": "h100", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200", "gb300": "gb300",
    "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
OLD_NCCL = ("nccl/2.23",)
# In the box of eight L40S, a group of eight shares less than one PCIe link, which is unusual.
LEFT_OUT = (("l40s", 8),)
# Vidur's boxes of bridged pairs. Below 1 MB its all_reduce times include ranks that wait for each other (60 us and more for
# 8 KB on NVLink), and its A40 messages run at 4 GB/s, less than PCIe; both are excluded.
PAIRS = {"a100_pairwise_nvlink": "a100-pcie", "h100_pairwise_nvlink": "h100-pcie"}
MESSAGES = {"a100_dgx": "a100", "h100_dgx": "h100", "a100_pairwise_nvlink": "a100-pcie"}
SETTLED_BYTES = 2**20
# Logs within an NVLink domain. Their rings of messages (sendrecv) are excluded: at 32 MB they reach a quarter of the rate that
# Vidur measured, at 512 MB all of it.
INSIDE_LOGS = {"NVLink4 NVSwitch": "h100", "NVL72 NVLink": "gb200"}


@dataclass(frozen=True)
class CollectiveRows:
    """Rows of one op: the buffer's bytes, the numbers of ranks and islands, seconds, and the weight of a row."""

    nbytes: np.ndarray
    ranks: np.ndarray
    islands: np.ndarray
    seconds: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.nbytes)

    def __getitem__(self, mask: np.ndarray) -> CollectiveRows:
        return CollectiveRows(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))

    @staticmethod
    def of(nbytes: np.ndarray, ranks: np.ndarray, islands: np.ndarray, seconds: np.ndarray) -> CollectiveRows:
        """Merges repetitions of a point (dtypes, runs, versions) into one row, their median."""
        keys, place = np.unique(np.stack([nbytes, ranks, islands]), axis=1, return_inverse=True)
        place = place.ravel()
        middle = np.array([np.median(seconds[place == index]) for index in range(keys.shape[1])])
        return CollectiveRows(keys[0], keys[1], keys[2], middle, np.ones(keys.shape[1]))


def together(parts: list[CollectiveRows]) -> CollectiveRows:
    return CollectiveRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in CollectiveRows.__dataclass_fields__))  # fmt: skip


def thinned(rows: CollectiveRows, per_octave: int = 8) -> CollectiveRows:
    """Keeps at most one row (the median by size) in an eighth of an octave, because sweeps in equal steps have most rows at large sizes."""
    bins = np.round(np.log2(rows.nbytes) * per_octave)
    keys = np.unique(np.stack([bins, rows.ranks, rows.islands]), axis=1, return_inverse=True)[1].ravel()
    keep = np.zeros(len(rows), bool)
    for key in range(keys.max() + 1):
        those = np.flatnonzero(keys == key)
        keep[those[len(those) // 2]] = True
    return rows[keep]


def inside(data: Folder, gpu: str) -> dict[tuple[str, str], CollectiveRows]:
    """The measurements within nodes of a GPU, by link and op."""
    found: dict[tuple[str, str], CollectiveRows] = {}
    systems = [system for system, name in INSIDE.items() if name == gpu]
    for system in systems:
        table = read_table(data, "collectives/aiconfigurator_nccl.csv")
        table = where(table, (table["system"] == system) & (table["impl"] == "nccl-tests"))
        table = where(table, ~np.isin(table["src_dir"], OLD_NCCL) | (gpu == "gb200"))
        for name, count in LEFT_OUT:
            if name == gpu:
                table = where(table, table["num_gpus"] != count)
        link = "pcie" if gpu in ("l40s", "rtx-pro-6000") else "nvlink"
        for op in sorted(set(table["op_name"])):
            of_op = where(table, table["op_name"] == op)
            found[link, OPS[op]] = _within(of_op, of_op["latency_us"])
    table = read_table(data, "collectives/vidur_network.csv")
    for system, name in PAIRS.items():
        if name == gpu:
            those = (table["system"] == system) & (table["op_name"] == "all_reduce")
            settled = where(table, those & (table["bytes"] >= SETTLED_BYTES))
            for link, count in (("nvlink", 2), ("pcie", 4)):
                of_link = where(settled, settled["num_gpus"] == count)
                found[link, "all_reduce"] = _within(of_link, of_link["median_us"])
    for system, name in MESSAGES.items():
        if name == gpu:
            messages = (table["system"] == system) & (table["op_name"] == "send_recv") & (table["gpus_per_node"] == 2)
            of_op = where(table, messages)
            found["nvlink", "send_recv"] = _within(of_op, of_op["median_us"])
    for wire, name in INSIDE_LOGS.items():
        if name == gpu:
            logs = read_table(data, "collectives/nccl_tests_logs.csv.gz")
            logs = where(logs, (logs["interconnect"] == wire) & (logs["op_name"] != "sendrecv"))
            for op in sorted(set(logs["op_name"])):
                of_op = where(logs, logs["op_name"] == op)
                rows = _within(of_op, of_op["latency_us"])
                found["nvlink", OPS[op]] = together([found["nvlink", OPS[op]], rows])
    return {key: thinned(rows) for key, rows in found.items()}


def source_of(gpu: str, link: str, op: str) -> str:
    if op == "send_recv" or gpu in PAIRS.values():
        return VIDUR
    return f"{NCCL_TESTS}, and {LOGS}" if gpu in INSIDE_LOGS.values() and link == "nvlink" else NCCL_TESTS


def _within(table: Table, microseconds: np.ndarray) -> CollectiveRows:
    ones = np.ones(len(microseconds))
    return CollectiveRows.of(table["bytes"], table["num_gpus"], ones, microseconds * 1e-6)


@dataclass(frozen=True)
class MeasuredCollective:
    """A cluster that was measured across its network, described as in the catalog."""

    name: str
    network: str
    machine: Cluster
    note: str


def _machine(network: str, nodes: int, node: str, **changes: object) -> Cluster:
    whole = cluster(node=node, nodes=nodes, network=network)
    kind = whole.node.model_copy(update=changes)
    per_node = changes.get("gpus_per_node", whole.gpus_per_node)
    return whole.model_copy(update={"node": kind, "gpus_per_node": per_node})


@functools.cache
def clusters() -> dict[str, MeasuredCollective]:
    polaris = _machine("slingshot-11", 4096, "hgx-a100-40", gpus_per_node=4, nics=2, nvlink_domain=4, topology="mesh")
    known = [
        MeasuredCollective("sophia", "infiniband-hdr", cluster(node="hgx-a100-40", nodes=2), "DGX A100, 2 nodes"),
        MeasuredCollective("polaris", "slingshot-11", polaris, "4 x A100 and 2 ports a node, 2 to 540 nodes"),
        MeasuredCollective("oci", "roce-200", cluster(node="hgx-a100-40", nodes=2, network="roce-200"), "8 x A100 and 1600 Gb/s a node, 2 nodes"),
        MeasuredCollective("h100", "infiniband-ndr", cluster(node="hgx-h100", nodes=16), "8 x H100 and 8 ports a node, 2 and 10 nodes, from 32 MB; InfiniBand or RoCE, not stated"),
        MeasuredCollective("nvl72", "infiniband-ndr", cluster(node="gb200-nvl72", nodes=360), "GB200 NVL72 racks, 1, 2 and 20, from 512 MB"),
        MeasuredCollective("vidur-h100", "infiniband-ndr", cluster(node="hgx-h100", nodes=2), "messages between two DGX H100"),
    ]  # fmt: skip
    return {measured.name: measured for measured in known}


# argonne-lcf tried settings of Slingshot's driver: it recommends 4, while 5 helps large all_to_all and slows small sizes. The largest runs
# used only 5. On InfiniBand they make no difference.
RECOMMENDED, LARGE_RUNS = "4", "5"
PLACES = {
    "InfiniBand (Sophia DGX A100, 8 GPU/node)": "sophia",
    "Slingshot (Polaris, 4 GPU/node)": "polaris",
    "Slingshot (Sirius, 4 GPU/node)": "polaris",
    "RDMA RoCE (BM.GPU.B4.8, 1600 Gbps/node)": "oci",
    "InfiniBand/RoCE ~400Gb per GPU (inferred from 48 GB/s/GPU busbw)": "h100",
    "NVL72 NVLink + InfiniBand inter-rack": "nvl72",
}
TRAYS_PER_RACK = 18


def log_of(name: str) -> str:
    return "Vidur" if name == "vidur-h100" else LOGS


def outside(data: Folder, name: str) -> dict[str, CollectiveRows]:
    """The measurements across a cluster's network, by op."""
    if name == "vidur-h100":
        table = read_table(data, "collectives/vidur_network.csv")
        alone = (table["system"] == "h100_dgx") & (table["op_name"] == "send_recv") & (table["gpus_per_node"] == 1)
        table = where(table, alone)
        twos = np.full(len(table["bytes"]), 2.0)
        return {"send_recv": thinned(CollectiveRows.of(table["bytes"], twos, twos, table["median_us"] * 1e-6))}
    table = read_table(data, "collectives/nccl_tests_logs.csv.gz")
    table = where(table, np.array([PLACES.get(wire) == name for wire in table["interconnect"]]))
    if name == "polaris":
        table = where(table, _polaris_settings(table))
    found = {}
    for op in sorted(set(table["op_name"])):
        of_op = where(table, table["op_name"] == op)
        if (
            op == "sendrecv"
        ):  # a ring of messages: with two nodes each port carries one; with more it measures the fabric
            of_op = where(of_op, (of_op["num_nodes"] == 2) & (of_op["num_gpus"] == 2))
        islands = of_op["num_nodes"] / (TRAYS_PER_RACK if name == "nvl72" else 1)
        found[OPS[op]] = CollectiveRows.of(of_op["bytes"], of_op["num_gpus"], islands, of_op["latency_us"] * 1e-6)
    return found


def _polaris_settings(table: Table) -> np.ndarray:
    """Rows with the recommended setting; for group sizes that were run only with the other setting, rows with that."""
    keys = list(zip(table["op_name"], table["num_gpus"], strict=True))
    setting = table["env_variant"].astype(str)
    recommended = {key for key, value in zip(keys, setting, strict=True) if value == RECOMMENDED}
    wanted = [RECOMMENDED if key in recommended else LARGE_RUNS for key in keys]
    answer: np.ndarray = setting == np.array(wanted)
    return answer
