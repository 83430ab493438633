"""A job: the traces of its emulated ranks, and which of their calls meet. hangs.py checks whether these calls agree."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from maya_core.errors import MayaError
from maya_core.installation import installation
from maya_core.trace.communication import POINT_TO_POINT, CollectiveCall, Communicator
from maya_core.trace.rank import RankTrace, read_trace
from maya_core.trace.run_folder import MANIFEST, find_run, is_running, read_about, runs_in
from maya_core.trace.schema import EventKind
from maya_core.trace.unknown_read import EXTREMES, Extreme, UnknownRead

PREDICTION = "prediction.json"  # in the same folder, once the job is predicted
VERSION = 1


@dataclass(frozen=True)
class Rendezvous:
    """Calls that meet in order: the collectives of a communicator, or the messages from one of its ranks to another.

    The n-th call of a member meets the n-th call of the others. The recorded number does not matter: NCCL knows only the
    order, and a CUDA graph replays the number that it captured.
    """

    communicator: Communicator  # with `rank` -1: it belongs to no particular rank
    members: tuple[int, ...]  # emulated global ranks; for messages the sender and the receiver
    messages: bool
    events: np.ndarray  # [call, member]: index into the member's events; -1 if it makes no such call

    @property
    def complete(self) -> int:
        """The number of calls that every member makes."""
        return int(np.count_nonzero((self.events >= 0).all(axis=1)))


@dataclass(frozen=True)
class JobTrace:
    """A recorded job: the traces of its emulated ranks, up to the same step, and where they meet.

    Ranks that were not emulated are assumed to run in lockstep with those that were. They are no members of a rendezvous, and messages to or
    from them meet no call; neither do messages that a rank sends to itself.
    """

    world_size: int
    """The number of GPUs."""
    nodes: int
    """The number of nodes."""
    gpus_per_node: int
    """GPUs of each node."""
    ranks: dict[int, RankTrace]
    """The trace of each emulated rank, by its number."""
    rendezvous: list[Rendezvous]
    """Which collectives and messages of the ranks meet."""
    command: tuple[str, ...] = ()
    """The command that was run, if it is known, without secrets."""
    node: str | None = None
    """The kind of node, if the user named it."""
    network: str | None = None
    """The network between nodes, if the user named it."""
    exit_code: int = 0
    """The exit code of the command."""
    failed: Mapping[int, int] = field(default_factory=dict)
    """The exit codes of ranks that ended with one, in the order in which they ended."""
    bounds: Mapping[Extreme, JobTrace | None] = field(default_factory=dict)
    """The same job with unknown masks that keep nothing, and with masks that keep everything, where memory depends on them. None: that run failed."""

    @property
    def gpu(self) -> str:
        """The name of the GPU that the job was recorded for."""
        return str(next(iter(self.ranks.values())).meta["gpu"])

    @property
    def unknown_reads(self) -> list[UnknownRead]:
        """Where the program read values that nobody knows, those of all ranks together."""
        found: dict[tuple[str, ...], UnknownRead] = {}
        for trace in self.ranks.values():
            for row in trace.meta.get("unknown_values", []):
                read = UnknownRead(**row)
                found[read.key] = found[read.key].with_reads_of(read) if read.key in found else read
        return list(found.values())

    @property
    def processes(self) -> int:
        """The number of ranks. One process may use all GPUs of a node; `world_size` counts GPUs."""
        return max(int(trace.meta.get("world_size") or 1) for trace in self.ranks.values())


def meetings_of(job: JobTrace) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """For every event of every rank, the number of its meeting over all rendezvous, or -1; and how many ranks take part in each
    meeting."""
    numbers = {rank: np.full(len(trace.events), -1, np.int64) for rank, trace in job.ranks.items()}
    counts, first = [np.zeros(0, np.int64)], 0
    for meet in job.rendezvous:
        here = meet.events >= 0
        counts.append(np.count_nonzero(here, axis=1))
        for column, member in enumerate(meet.members):
            rows = np.flatnonzero(here[:, column])
            numbers[member][meet.events[rows, column]] = first + rows
        first += len(meet.events)
    return numbers, np.concatenate(counts)


class _Line(NamedTuple):
    """What identifies a rendezvous."""

    communicator: Communicator
    source: int  # this and the next two are for messages; -1 for collectives
    destination: int
    tag: int  # by which gloo matches messages


def collate(traces: list[RankTrace]) -> JobTrace:
    """Collates the traces of a job's ranks."""
    ranks = {int(trace.meta["rank"]): trace for trace in sorted(_cut(traces), key=lambda trace: trace.meta["rank"])}
    found: dict[_Line, dict[int, np.ndarray]] = {}  # by column
    members: dict[_Line, tuple[int, ...]] = {}
    for rank, trace in ranks.items():
        for line, op, events in _lines(trace):
            if line not in members:
                ends = (line.source, line.destination) if op else line.communicator.ranks
                members[line] = tuple(end for end in ends if end in ranks)
            column = POINT_TO_POINT.index(op) if op else members[line].index(rank)
            found.setdefault(line, {})[column] = events
    first = next(iter(ranks.values())).meta
    world_size, nodes = first.get("world_size") or 1, first.get("nodes") or 1
    return JobTrace(
        world_size,
        nodes,
        first.get("gpus_per_node") or -(-world_size // nodes),
        ranks,
        [
            Rendezvous(line.communicator, members[line], line.source >= 0, _side_by_side(columns, len(members[line])))
            for line, columns in found.items()
            if line.source < 0 or len(set(members[line])) == 2
        ],
    )


def _cut(traces: list[RankTrace]) -> list[RankTrace]:
    """Cuts traces off at the last step of the first rank that Maya stopped. A rank that ended by itself is complete."""
    steps = min((trace.steps for trace in traces if trace.meta["ended"] == "stopped"), default=None)
    if steps is None:
        return traces
    whole = []
    for trace in traces:
        ends = np.flatnonzero(trace.events["kind"] == EventKind.STEP_END)
        if 0 < steps <= len(ends):
            last = int(ends[steps - 1])
            if steps == len(ends):  # evaluation follows the last step
                evaluated = np.flatnonzero(trace.events["kind"] == EventKind.EVALUATION)
                last = max([last, *evaluated[-1:].tolist()])
            trace = replace(trace, events=trace.events[: last + 1])
        whole.append(trace)
    return whole


def _lines(trace: RankTrace) -> Iterator[tuple[_Line, str, np.ndarray]]:
    """A rank's calls by rendezvous, each in order: (line, which end of a message this rank is, events)."""
    groups = [replace(group, rank=-1) for group in trace.communicators]
    first: dict[Communicator, int] = {}  # a group that is destroyed and created again is the same one
    same = [first.setdefault(group, number) for number, group in enumerate(groups)]
    numbers: dict[tuple[int, int, int, str], int] = {}
    by_call = np.zeros(len(trace.collectives), np.int64)
    for number, call in enumerate(trace.collectives):
        ends = _ends(call, trace.communicators[call.communicator])
        by_call[number] = numbers.setdefault((same[call.communicator], *ends), len(numbers))
    indices = np.flatnonzero(trace.events["kind"] == EventKind.COLLECTIVE)
    tags = trace.events["a"][indices] >> 32
    keys = (by_call[trace.events["subject"][indices]] << 32) + tags
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    lines = list(numbers)
    for key, start, stop in zip(distinct.tolist(), starts, [*starts[1:], len(order)], strict=False):
        group, source, destination, op = lines[key >> 32]
        yield _Line(groups[group], source, destination, key & 0xFFFFFFFF), op, indices[order[start:stop]]


def _ends(call: CollectiveCall, group: Communicator) -> tuple[int, int, str]:
    """The source and destination of a message, and the op of this rank."""
    if call.op not in POINT_TO_POINT:
        return -1, -1, ""
    me, peer = group.ranks[group.rank], group.ranks[call.peer]
    return (me, peer, "send") if call.op == "send" else (peer, me, "recv")


def _side_by_side(columns: dict[int, np.ndarray], width: int) -> np.ndarray:
    table = np.full((max(len(column) for column in columns.values()), width), -1, np.int64)
    for place, column in columns.items():
        table[: len(column), place] = column
    return table


class Manifest(BaseModel):
    """job.json, which exists once the traces of all ranks do."""

    format: Literal["maya-job"] = "maya-job"
    version: int = VERSION
    world_size: int
    nodes: int
    gpus_per_node: int
    ranks: list[int]  # that were emulated
    command: list[str] = []
    node: str | None = None
    network: str | None = None
    exit_code: int = 0  # of the command
    failed: dict[int, int] = {}  # exit codes of ranks


def trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.trace"


def bound_folder(folder: Path, extreme: Extreme) -> Path:
    """Where the traces of a run lie whose unknown masks keep nothing, or everything."""
    return folder / f"{extreme}-kept"


def write_manifest(folder: Path, job: JobTrace) -> None:
    """Writes job.json, which marks the traces in the folder as a complete job, so it must be written last."""
    manifest = Manifest(
        world_size=job.world_size,
        nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        ranks=list(job.ranks),
        command=list(job.command),
        node=job.node,
        network=job.network,
        exit_code=job.exit_code,
        failed=dict(job.failed),
    )
    part = folder / (MANIFEST + ".part")
    part.write_text(manifest.model_dump_json(indent=2) + "\n")
    os.replace(part, folder / MANIFEST)


def read_traces(folder: Path) -> list[RankTrace]:
    """All rank traces in a folder."""
    return [read_trace(path) for path in sorted(folder.glob("rank-*.trace"))]


def read_job(folder: str | Path) -> JobTrace:
    """Reads the job that `maya run` recorded: from the folder of the run, or from a folder of runs (`--out`), whose newest is meant. A `MayaError`
    says what is wrong with a folder that cannot be read."""
    return read_run(find_run(Path(folder)))


def read_run(folder: Path) -> JobTrace:
    """Reads the job in the folder of one run."""
    manifest = _read_manifest(folder)
    beside = {extreme: bound_folder(folder, extreme) for extreme in EXTREMES}
    bounds = {
        extreme: read_run(each) if (each / MANIFEST).exists() else None
        for extreme, each in beside.items()
        if each.is_dir()
    }
    traces = []
    for rank in manifest.ranks:
        try:
            traces.append(read_trace(trace_path(folder, rank)))
        except MayaError as error:
            raise MayaError(
                f"rank {rank} of the job in {folder} cannot be read: {error.problem}", error.advice
            ) from error
    return replace(
        collate(gave_up(traces, manifest.exit_code, manifest.failed)),
        world_size=manifest.world_size,
        nodes=manifest.nodes,
        gpus_per_node=manifest.gpus_per_node,
        command=tuple(manifest.command),
        node=manifest.node,
        network=manifest.network,
        exit_code=manifest.exit_code,
        failed=manifest.failed,
        bounds=bounds,
    )


def gave_up(traces: list[RankTrace], exit_code: int, failed: Mapping[int, int]) -> list[RankTrace]:
    """Marks ranks as failed that their exit codes say so of: a rank that exits with a code cannot record that itself. If no rank is known to
    have failed, but the command has, those that were not stopped by Maya did."""
    marked = [_failed(one, failed[one.meta["rank"]]) if failed.get(one.meta["rank"]) else one for one in traces]
    if not exit_code or failed or any(trace.meta["ended"] in ("failed", "hung") for trace in marked):
        return marked
    return [_failed(one, exit_code) if one.meta["ended"] == "completed" else one for one in marked]


def _failed(trace: RankTrace, code: int) -> RankTrace:
    if trace.meta["ended"] in ("failed", "hung"):
        return trace
    return replace(trace, meta={**trace.meta, "ended": "failed", "failure": f"it ended with exit code {code}"})


def _no_job(folder: Path) -> MayaError:
    if is_running(folder):
        return MayaError(f"the run in {folder} is still going on.", "Wait for its end. `maya runs` lists all runs.")
    others = "`maya runs` lists the runs in a folder."
    if read_about(folder) is not None:
        return MayaError(f"the run in {folder} did not finish: it has no {MANIFEST}, which is written last.", others)
    if runs_in(folder):
        return MayaError(f"{folder} holds no finished run.", others)
    what = f"{folder} holds no run" if folder.exists() else f"there is no run {folder}"
    return MayaError(f"{what}.", f"Give the folder of a run, or a folder of runs such as maya-out. {others}")


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.exists():
        raise _no_job(folder)
    try:
        manifest = Manifest.model_validate_json(path.read_text())
    except (ValidationError, OSError, UnicodeDecodeError) as error:
        raise MayaError(f"{path} is not a Maya job: {error}", "Run `maya run` again to record it.") from error
    if manifest.version > VERSION:
        raise MayaError(
            f"{path} was written by a newer Maya (job version {manifest.version}, this one reads up to {VERSION}).",
            installation().upgrade_advice(),
        )
    if not manifest.ranks:
        raise MayaError(f"{path} lists no ranks.", "Run `maya run` again to record it.")
    return manifest
