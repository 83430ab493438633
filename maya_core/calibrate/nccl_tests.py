"""Reads measurements from the output of NVIDIA's nccl-tests (all_reduce_perf and others), of one test or of several in a row."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from maya_core.calibrate.profiler_trace import agreed_gpu
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_network
from maya_core.hardware.cluster import cluster
from maya_core.predictor.calibration import Collective

OPS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "send", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter",
}  # fmt: skip
IN_PLACE = ("all_reduce", "broadcast", "reduce")  # PyTorch calls these in place; the others have two buffers
PREFIX = re.compile(r"^(\[\d+,\d+\]<std\w+>:|\s*\d+:(?= *#| +\d))")  # of mpirun --tag-output, of srun --label
RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$"
)
TEST = re.compile(r"\b(" + "|".join(OPS) + r")_perf")
OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)\s*(\w+)")
ITERATIONS = re.compile(r"(?<!warmup )(?<!agg )\biters: (\d+)")


@dataclass
class Table:
    """The sizes and times of one test."""

    op: str | None
    ranks: dict[int, tuple[str, str, str]]  # by rank: process, host, and the driver's name of the GPU
    iterations: int
    rows: list[tuple[float, float]] = field(default_factory=list)  # bytes, seconds
    ended: bool = False


@dataclass
class Output:
    gpu: str
    collectives: list[Collective]
    notes: list[str]


def read(
    path: Path,
    *,
    gpu: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | None = None,
    op: str | None = None,
) -> Output:
    """Reads the collectives in a file, and the GPU they ran on. The ranks and GPUs in the file must agree with the arguments."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise MayaError(f"{path} cannot be read: {error.strerror}.", "Give the output of nccl-tests.") from error
    if op is not None and op.removesuffix("_perf") not in OPS and op not in OPS.values():
        raise MayaError(f"--op {op}: Maya does not know this test.", f"The known tests are {', '.join(OPS)}.")
    tables = [table for table in _tables(path, text) if table.rows]
    if not tables:
        raise MayaError(
            f"{path} has no measurements: it is not the output of nccl-tests, or the run failed before its first size.",
            "Give the whole output of all_reduce_perf (or another *_perf).",
        )
    board = agreed_gpu([name for table in tables for _, _, name in table.ranks.values()], gpu, str(path))
    found: dict[tuple[str, float, int, int, str], Collective] = {}
    notes = []
    for table in tables:
        name = _op_of(path, table, op)
        wide, each = _shape(path, table, nodes, gpus_per_node)
        over = ""
        if wide > 1:
            over = find_network(network).name if network else cluster(board.name, each, wide).network.name
        if not table.ended:
            notes.append(f"{name}: the test did not finish; the {len(table.rows)} sizes that it completed are used.")
        for nbytes, seconds in table.rows:
            found[name, nbytes, each, wide, over] = Collective(
                op=name,
                bytes=nbytes,
                ranks_per_node=each,
                nodes=wide,
                network=over,
                seconds=seconds,
                samples=table.iterations,
            )
    return Output(board.name, list(found.values()), notes)


def _tables(path: Path, text: str) -> list[Table]:
    tables: list[Table] = []
    table = Table(None, {}, 1)
    times: list[
        int
    ] = []  # positions of the time columns, counted from the right, because columns on the left may be blank
    for line in text.splitlines():
        line = PREFIX.sub("", line)
        if test := TEST.search(line):
            if table.rows and not line.startswith("# Collective test concluded"):
                tables.append(table)
                table = Table(None, {}, 1)
            table.op = OPS[test[1]]
        if line.startswith("# nThread") and table.rows:
            tables.append(table)
            table = Table(None, {}, 1)
        if iterations := ITERATIONS.search(line):
            table.iterations = max(1, int(iterations[1]))
        if rank := RANK.search(line):
            _add_rank(path, table, int(rank[1]), (rank[2], rank[3], rank[4]))
        elif bounds := OUT_OF_BOUNDS.search(line):
            table.ended = True
            if bounds[2] != "OK":
                raise MayaError(
                    f"{path}: the test failed, {bounds[1]} values were wrong. Its times cannot be trusted.",
                    "Look for a faulty GPU or link, and run it again.",
                )
        elif line.startswith("#") and "algbw" in line:
            names = line.lstrip("#").split()
            times = [place - len(names) for place, name in enumerate(names) if name == "time"]
        elif times and re.match(r"\s*\d+\s+\d+\s", line):
            _add_row(table, line.split(), times)
    return [*tables, table]


def _add_rank(path: Path, table: Table, rank: int, who: tuple[str, str, str]) -> None:
    if table.ranks.get(rank, who) != who:
        raise MayaError(
            f"{path}: rank {rank} occurs twice, so each process ran alone, without the others.",
            "Build nccl-tests with MPI=1 and run it with mpirun or srun.",
        )
    table.ranks[rank] = who


def _add_row(table: Table, cells: list[str], times: list[int]) -> None:
    place = times[-1] if len(times) > 1 and table.op in IN_PLACE else times[0]
    try:
        seconds = float(cells[place]) * 1e-6
    except (ValueError, IndexError):  # a truncated line, or N/A
        return
    if seconds > 0 and float(cells[0]) > 0:
        table.rows.append((float(cells[0]), seconds))


def _op_of(path: Path, table: Table, given: str | None) -> str:
    if given is not None:
        return OPS.get(given.removesuffix("_perf"), given)
    if table.op is None:
        raise MayaError(f"{path} does not name its test.", f"Give it as --op: {', '.join(OPS)}.")
    return table.op


def _shape(path: Path, table: Table, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """The number of nodes, and of ranks per node."""
    if not table.ranks:
        if nodes is None or gpus_per_node is None:
            raise MayaError(f"{path} does not list its ranks.", "Give --nodes and --gpus-per-node.")
        return nodes, gpus_per_node
    hosts = Counter(host for _, host, _ in table.ranks.values())
    if len(set(hosts.values())) > 1:
        raise MayaError(
            f"{path}: nodes have {sorted(set(hosts.values()))} ranks.", "Run it with the same number on each node."
        )
    wide, each = len(hosts), next(iter(hosts.values()))
    if (nodes or wide, gpus_per_node or each) != (wide, each):
        raise MayaError(
            f"{path} was measured on {wide} node{'s' * (wide != 1)} with {each} ranks each, not on {nodes or wide} with {gpus_per_node or each}.",
            "Remove --nodes and --gpus-per-node: the file contains these numbers.",
        )
    return wide, each
