"""The summary of an emulated run: peak memory by category and whether it fits, kernels and FLOPs per step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from pydantic import BaseModel
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from maya_core.device.kernels.call import ITEM_BYTES
from maya_core.hardware.catalog import find_gpu
from maya_core.trace.hangs import find_hangs
from maya_core.trace.job import JobTrace
from maya_core.trace.memory import device_peaks
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import Kind, Phase
from maya_core.trace.wording import elements, ranks_in_words

GIB = 2**30
MOST_RANKS = 16
MOST_ROWS = 12

# What is not known of some ops, for the reader to weigh. docs/memory.md says more.
CAVEATS = {
    "convolution": "cuDNN's workspaces for convolutions are not included in memory.",
    "_cudnn_rnn": "The reserve space of cuDNN's recurrent networks is an estimate.",
    "_scaled_dot_product_cudnn_attention": "The workspace of cuDNN's attention is an estimate.",
}


class DeviceMemory(BaseModel):
    """Peak memory of one emulated GPU."""

    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_allocator_bytes: int
    capacity_bytes: int
    by_category_bytes: dict[str, int]
    peak_phase: str
    peak_module: str
    peak_step: int
    out_of_memory_bytes: int | None = None  # what was asked for where memory ran out
    fits: bool | None  # None: the program ended before its time, for another reason


class Communication(BaseModel):
    """What a rank does on one communicator with one op, in its last step."""

    group: str  # torch's group name
    backend: str
    group_size: int
    op: str
    calls: int
    bytes: int  # given by the rank; received where it gives nothing


class Summary(BaseModel):
    """What one rank did. `*_per_step` are of the last step; the first ones allocate optimizer state and warm up."""

    rank: int
    gpu: str
    ended: str  # completed, stopped (after the steps asked for), failed, or hung (would wait for another rank for ever)
    steps: int
    memory: list[DeviceMemory]
    kernels_per_step: int | None
    flops_per_step: int | None
    host_ms_per_step: float | None  # of the emulation itself, not of the job
    top_ops: list[tuple[str, int]]
    communication: list[Communication]
    caveats: list[str]

    def __str__(self) -> str:
        console = Console(width=100, no_color=True)
        with console.capture() as captured:
            console.print(render(self))
        return captured.get()


class JobSummary(BaseModel):
    """What a job did: its emulated ranks, and whether they would get through."""

    world_size: int
    nodes: int
    gpus_per_node: int
    ranks: list[Summary]
    hangs: list[str]

    @property
    def crowded(self) -> Summary:
        """The rank with the least memory left."""

        def taken(rank: Summary) -> tuple[bool, int]:
            return any(memory.fits is False for memory in rank.memory), max(
                (memory.peak_reserved_bytes for memory in rank.memory), default=0
            )

        return max(self.ranks, key=taken)


def summarise_job(job: JobTrace) -> JobSummary:
    return JobSummary(
        world_size=job.world_size,
        nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        ranks=[summarise(trace) for trace in job.ranks.values()],
        hangs=[str(hang) for hang in find_hangs(job)] or _unexplained(job),
    )


def _unexplained(job: JobTrace) -> list[str]:
    """Ranks that wait for something no other emulated rank has to do with: a store's key, say."""
    reasons = sorted({trace.meta.get("hung", "") for trace in job.ranks.values()} - {""})
    advice = "If a rank that is not emulated would go on, emulate it too: --ranks all, or the ranks by number."
    return [f"This job would hang: {reason}. {advice}" for reason in reasons]


def summarise(trace: RankTrace) -> Summary:
    """Reads the summary off a rank's trace."""
    last = trace.step(trace.steps) if trace.steps else trace.events[:0]
    counts: Counter[str] = Counter()
    for subject, times in zip(*np.unique(last[last["kind"] == Kind.OP]["subject"], return_counts=True), strict=True):
        signature = trace.signatures[int(subject)]
        counts[signature.op.removeprefix("aten::")] += signature.launches * int(times)
    return Summary(
        rank=trace.meta["rank"],
        gpu=trace.meta["gpu"],
        ended=trace.meta["ended"],
        steps=trace.steps,
        memory=_memory(trace),
        kernels_per_step=trace.launches(last) if trace.steps else None,
        flops_per_step=trace.flops(last) if trace.steps else None,
        host_ms_per_step=(int(last["time_ns"][-1]) - int(last["time_ns"][0])) / 1e6 if len(last) else None,
        top_ops=counts.most_common(5),
        communication=_communication(trace, last),
        caveats=_caveats(trace),
    )


def _communication(trace: RankTrace, events: np.ndarray) -> list[Communication]:
    calls: Counter[tuple[int, str]] = Counter()
    sent: Counter[tuple[int, str]] = Counter()
    chosen = events[events["kind"] == Kind.COLLECTIVE]
    for subject, times in zip(*np.unique(chosen["subject"], return_counts=True), strict=True):
        call = trace.calls[int(subject)]
        calls[call.communicator, call.op] += int(times)
        sent[call.communicator, call.op] += int(times) * elements(call) * ITEM_BYTES.get(call.dtype, 1)
    rows = []
    for (number, op), times in calls.items():
        group = trace.communicators[number]
        rows.append(
            Communication(
                group=group.name,
                backend=group.backend,
                group_size=len(group.ranks),
                op=op,
                calls=times,
                bytes=sent[number, op],
            )
        )
    return sorted(rows, key=lambda row: -row.bytes)


def _caveats(trace: RankTrace) -> list[str]:
    ops = {signature.op.split("::")[-1].split(".")[0] for signature in trace.signatures}
    caveats = [CAVEATS[name] for name in sorted(ops & CAVEATS.keys())]
    if assumed := sum(trace.meta.get("stand_ins", {}).values()):
        caveats.append(
            f"In {assumed} collective{'s' * (assumed != 1)} of host data, ranks that are not emulated were taken to give what this one gives."
        )
    survived = (
        int(np.count_nonzero(trace.events["kind"] == Kind.OUT_OF_MEMORY)) if trace.meta["ended"] != "failed" else 0
    )
    if survived:
        caveats.append(f"Memory ran out {survived} time{'s' * (survived != 1)}, and the program went on.")
    if retries := max(trace.meta["alloc_retries"]):
        caveats.append(
            f"The allocator had to give its cache back {retries} time{'s' * (retries != 1)} to go on: expect slow steps."
        )
    return caveats


def _memory(trace: RankTrace) -> list[DeviceMemory]:
    ooms = trace.events[trace.events["kind"] == Kind.OUT_OF_MEMORY]
    capacity, outside = trace.meta["gpu_memory_bytes"], trace.meta["outside_allocator_bytes"]
    result = []
    for peak in device_peaks(trace):
        asked = [int(event["a"]) for event in ooms if event["device"] == peak.device]
        result.append(
            DeviceMemory(
                device=peak.device,
                peak_allocated_bytes=peak.allocated_bytes,
                peak_reserved_bytes=peak.reserved_bytes,
                outside_allocator_bytes=outside,
                capacity_bytes=capacity,
                by_category_bytes=peak.by_category,
                peak_phase=Phase(peak.phase).name.lower(),
                peak_module=peak.module,
                peak_step=peak.step,
                out_of_memory_bytes=max(asked) if asked else None,
                fits=trace.meta["ended"] in ("completed", "stopped") or (False if asked else None),
            )
        )
    return result


def _bytes(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def _flops(count: int) -> str:
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}FLOP"
    return f"{count / 1e6:.2f} MFLOP"


def render(summary: Summary) -> Any:
    """The summary for a terminal."""
    gpu = find_gpu(summary.gpu)
    lines: list[Any] = [
        Text(
            f"{gpu.driver_name}, emulated: {summary.steps} step{'s' * (summary.steps != 1)}, {summary.ended}",
            style="bold",
        )
    ]
    for memory in summary.memory:
        lines.append(_memory_table(memory, len(summary.memory) > 1))
    if summary.kernels_per_step is not None and summary.flops_per_step is not None:
        lines.append(
            Text(f"Per step: {summary.kernels_per_step:,} kernels and copies, {_flops(summary.flops_per_step)}")
        )
        lines.append(
            Text("Most launched: " + ", ".join(f"{op} {count:,}" for op, count in summary.top_ops), style="dim")
        )
    else:
        lines.append(Text("No optimizer step was seen: figures per step are not known.", style="yellow"))
    lines += [Text(f"Note: {caveat}", style="yellow") for caveat in summary.caveats]
    return Group(*lines)


def render_job(job: JobSummary) -> Any:
    """The job for a terminal: the most crowded rank in full, all of them in a table."""
    if job.world_size == 1 and len(job.ranks) == 1:
        return render(job.ranks[0])
    crowded = job.crowded
    lines: list[Any] = [
        Text(
            f"{job.world_size:,} x {find_gpu(crowded.gpu).driver_name} ({job.nodes:,} node{'s' * (job.nodes != 1)} of {job.gpus_per_node}), "
            f"emulated by {ranks_in_words([rank.rank for rank in job.ranks])}",
            style="bold",
        )
    ]
    if len(job.ranks) > 1:
        lines += [_rank_table(job), Text(f"The most crowded, rank {crowded.rank}:", style="bold")]
    lines.append(render(crowded))
    if crowded.communication:
        lines.append(_communication_table(crowded))
    lines += [Text(hang, style="bold red") for hang in job.hangs]
    return Group(*lines)


def _rank_table(job: JobSummary) -> Table:
    table = Table(title="Ranks", title_justify="left")
    for heading in ("rank", "ended", "steps", "peak allocated", "peak reserved", "kernels per step", "sent per step"):
        table.add_column(heading, justify="left" if heading == "ended" else "right")
    for rank in job.ranks[:MOST_RANKS]:
        memory = max(rank.memory, key=lambda one: one.peak_reserved_bytes, default=None)
        table.add_row(
            str(rank.rank),
            rank.ended,
            str(rank.steps),
            _bytes(memory.peak_allocated_bytes) if memory else "-",
            _bytes(memory.peak_reserved_bytes) if memory else "-",
            f"{rank.kernels_per_step:,}" if rank.kernels_per_step is not None else "-",
            _bytes(sum(row.bytes for row in rank.communication)),
        )
    if len(job.ranks) > MOST_RANKS:
        table.caption = f"and {len(job.ranks) - MOST_RANKS} more"
    return table


def _communication_table(rank: Summary) -> Table:
    table = Table(title="Communication per step", title_justify="left")
    for heading in ("op", "group", "ranks", "calls", "given"):
        table.add_column(heading, justify="right" if heading in ("ranks", "calls", "given") else "left")
    for row in rank.communication[:MOST_ROWS]:
        table.add_row(row.op, f"{row.backend} {row.group}", f"{row.group_size:,}", f"{row.calls:,}", _bytes(row.bytes))
    return table


def _memory_table(memory: DeviceMemory, numbered: bool) -> Table:
    if memory.fits:
        verdict = Text(
            f"fits: {_bytes(memory.capacity_bytes - memory.peak_reserved_bytes - memory.outside_allocator_bytes)} free at the most crowded",
            style="green",
        )
    elif memory.fits is None:
        verdict = Text("not known to fit: the program did not get to its end", style="yellow")
    else:
        verdict = Text(
            f"DOES NOT FIT: out of memory asking for {_bytes(memory.out_of_memory_bytes or 0)} in step {memory.peak_step}",
            style="bold red",
        )
    table = Table(
        title=f"Memory of GPU {memory.device}" if numbered else "Memory",
        title_justify="left",
        caption=verdict,
        caption_justify="left",
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    where = f"step {memory.peak_step}, {memory.peak_phase}" + (f", {memory.peak_module}" if memory.peak_module else "")
    table.add_row("peak allocated", _bytes(memory.peak_allocated_bytes), where)
    for category, count in memory.by_category_bytes.items():
        if count:
            table.add_row(
                f"  {category.replace('_', ' ')}", _bytes(count), f"{100 * count / memory.peak_allocated_bytes:.0f} %"
            )
    table.add_row("peak reserved", _bytes(memory.peak_reserved_bytes), "held by PyTorch's caching allocator")
    table.add_row("outside", _bytes(memory.outside_allocator_bytes), "CUDA context and libraries")
    table.add_row("capacity", _bytes(memory.capacity_bytes), "")
    return table
