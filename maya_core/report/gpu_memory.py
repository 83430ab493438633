"""Memory of the emulated GPUs: their peaks, what the peaks consist of, where they come from, and whether the job fits.

The peaks of a recorded trace come from `trace.memory_peaks`; for another GPU the trace is replanned first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from maya_core.hardware.catalog import gpus
from maya_core.hardware.models import Gpu
from maya_core.ops.replan import Replanned, replanned
from maya_core.predictor.pricing import platform_of, settled_calls
from maya_core.report.prediction import DeviceMemory, Memory, MemoryLimit, MemoryLimits, Peak
from maya_core.trace.call_names import generic
from maya_core.trace.job import JobTrace
from maya_core.trace.memory_peaks import DevicePeak, device_peaks, step_at
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EvaluationMark, EventKind, Phase
from maya_core.trace.unknown_read import EXTREMES

MOST_SHARES = 40


def memory(job: JobTrace, gpu: Gpu) -> Memory:
    """The memory of a job on a GPU, which may differ from the one it was emulated on."""
    found = _plain(job, gpu)
    if not (reads := [read for read in job.unknown_reads if read.decides_memory]):
        return found
    bounds = _bounds(job, gpu) if job.bounds else None
    if bounds is not None and _independent(found, job, gpu):
        return found
    certain = bounds is not None and bounds.complete and bounds.none_kept.fits and bounds.all_kept.fits
    return found.model_copy(
        update={
            "fits": found.fits if certain or found.fits is False else None,
            "depends_on": list(dict.fromkeys(read.source for read in reads)),
            "bounds": bounds,
        }
    )


def _plain(job: JobTrace, gpu: Gpu) -> Memory:
    """The memory of a job with the values that were taken for unknown ones."""
    rows = [row for rank, trace in job.ranks.items() for row in _devices(rank, trace, gpu)]
    answers = {row.fits for row in rows}
    if set(job.failed) - set(job.ranks):  # ranks that failed and left no trace
        answers.add(None)
    return Memory(fits=False if False in answers else None if None in answers or not rows else True, ranks=rows)


def _bounds(job: JobTrace, gpu: Gpu) -> MemoryLimits:
    """The memory of the fullest GPU in the runs at both extremes."""
    none, every = (_bound(job.bounds.get(extreme), gpu) for extreme in EXTREMES)
    return MemoryLimits(none_kept=none, all_kept=every, complete=_complete(job))


def _bound(job: JobTrace | None, gpu: Gpu) -> MemoryLimit:
    found = _plain(job, gpu) if job is not None else None
    fullest = found.fullest if found is not None else None
    if found is None or fullest is None or (found.fits is None and not _ended_well(job)):
        return MemoryLimit(used_bytes=None, fits=None)
    used = fullest.peak_reserved_bytes + fullest.outside_allocator_bytes + (fullest.out_of_memory_bytes or 0)
    return MemoryLimit(used_bytes=used, fits=found.fits)


def _ended_well(job: JobTrace | None) -> bool:
    return job is not None and all(trace.meta["ended"] in ("completed", "stopped") for trace in job.ranks.values())


def _complete(job: JobTrace) -> bool:
    """Whether every unknown size follows the masks: a number that is read has to be different at the two extremes."""
    none, every = (
        {read.key: read.number for read in found.unknown_reads} if (found := job.bounds.get(extreme)) else {}
        for extreme in EXTREMES
    )
    for read in job.unknown_reads:
        if read.decides_memory and not read.is_bounded:
            low, high = none.get(read.key), every.get(read.key)
            if low is None or high is None or read.number is None or not low <= read.number <= high or low == high:
                return False
    return True


def _independent(found: Memory, job: JobTrace, gpu: Gpu) -> bool:
    """Whether unknown values change no peak."""

    def peaks(memory: Memory) -> list[tuple[int, int, int, int]]:
        return [(row.rank, row.device, row.peak_allocated_bytes, row.peak_reserved_bytes) for row in memory.ranks]

    others = [job.bounds.get(extreme) for extreme in EXTREMES]
    return all(each is not None and _ended_well(each) and peaks(_plain(each, gpu)) == peaks(found) for each in others)


def _devices(rank: int, trace: RankTrace, gpu: Gpu) -> list[DeviceMemory]:
    ooms = np.flatnonzero(trace.events["kind"] == EventKind.OUT_OF_MEMORY)
    outside = {"CUDA context and libraries": gpu.outside_bytes, "NCCL buffers": trace.meta.get("nccl_bytes", 0)}
    result = []
    for peak in peaks_on(trace, gpu):
        failed = ooms[trace.events["device"][ooms] == peak.device]
        place = int(failed[np.argmax(trace.events["a"][failed])]) if len(failed) else None
        result.append(
            DeviceMemory(
                rank=rank,
                device=peak.device,
                peak_allocated_bytes=peak.allocated_bytes,
                peak_reserved_bytes=peak.reserved_bytes,
                outside_allocator_bytes=sum(outside.values()),
                outside_bytes=outside,
                capacity_bytes=gpu.memory_bytes,
                by_category_bytes=peak.by_category,
                peak_step=peak.step,
                peak_phase=peak.phase.name.lower(),
                peak_module=peak.module,
                peak_source=peak.source,
                at_peak=_at_peak(peak),
                out_of_memory_bytes=int(trace.events["a"][place]) if place is not None else None,
                out_of_memory_step=step_at(trace, place) if place is not None else None,
                out_of_memory_phase=_phase(trace, place) if place is not None else None,
                fits=_fits(trace, gpu, peak, sum(outside.values()), trace.events[failed]),
            )
        )
    return result


def peaks_on(trace: RankTrace, gpu: Gpu) -> list[DevicePeak]:
    """The peaks of a rank's devices on a GPU.

    If it is not the recorded GPU, temporaries and workspaces are those of the given one, and reserved memory is assumed to exceed
    allocated memory by as much as it did in the recording.
    """
    on_gpu = trace_on(trace, gpu)
    if on_gpu is trace:
        return device_peaks(trace)
    peaks = device_peaks(on_gpu)
    reserved = {peak.device: peak.reserved_bytes - peak.allocated_bytes for peak in device_peaks(trace)}
    return [replace(peak, reserved_bytes=peak.allocated_bytes + reserved[peak.device]) for peak in peaks]


def trace_on(trace: RankTrace, gpu: Gpu) -> RankTrace:
    """The trace with the memory that its calls need on a GPU; the recorded one, if the recorded GPU is that or is not known."""
    recorded = recorded_gpu(trace)
    return trace if recorded is None or recorded.name == gpu.name else _replanned(trace, recorded, gpu).trace


def _replanned(trace: RankTrace, recorded: Gpu, gpu: Gpu) -> Replanned:
    settled = replace(trace, calls=settled_calls(trace))
    return replanned(settled, platform_of(trace, recorded), platform_of(trace, gpu))


def unplaced_bytes(trace: RankTrace, gpu: Gpu) -> int:
    """The most memory that a call needs on this GPU and for which the recorded trace has no block."""
    recorded = recorded_gpu(trace)
    return 0 if recorded is None or recorded.name == gpu.name else _replanned(trace, recorded, gpu).unplaced_bytes


def recorded_gpu(trace: RankTrace) -> Gpu | None:
    """The GPU that a trace was recorded for; None if it is not in the catalog, for example because it comes from another user's file."""
    return gpus().get(trace.meta["gpu"])


def _phase(trace: RankTrace, event: int) -> str:
    return Phase(int(trace.events["phase"][event])).name.lower()


def _continued_after(trace: RankTrace, event: np.void) -> bool:
    """Whether the program made progress after an event: it completed a step; without steps, another backward; otherwise, any op.
    In validation, it finished a batch."""
    if event["phase"] == Phase.VALIDATION:
        evaluated = trace.events[trace.events["kind"] == EventKind.EVALUATION]
        batches = evaluated["time_ns"][evaluated["a"] == EvaluationMark.BATCH_END]
        return bool((batches > event["time_ns"]).any())
    is_op = trace.events["kind"] == EventKind.OP
    progress = (trace.events["kind"] == EventKind.STEP_END, is_op & (trace.events["phase"] == Phase.BACKWARD), is_op)
    furthest = next((one for one in progress if one.any()), is_op)
    return bool((trace.events["time_ns"][furthest] > event["time_ns"]).any())


def _fits(trace: RankTrace, gpu: Gpu, peak: DevicePeak, outside: int, ooms: np.ndarray) -> bool | None:
    finished = trace.meta["ended"] in ("completed", "stopped")
    if gpu.memory_bytes == trace.meta["gpu_memory_bytes"] and gpu.name == trace.meta["gpu"]:
        if len(ooms) and not (finished and _continued_after(trace, ooms[-1])):
            return False  # even if the program catches the error and then ends normally
        return True if finished else None
    if peak.allocated_bytes + outside > gpu.memory_bytes:
        return False
    # With less memory the allocator releases its cache before it fails. Only an emulation shows whether that is enough.
    return True if finished and peak.reserved_bytes + outside <= gpu.memory_bytes else None


def _at_peak(peak: DevicePeak) -> list[Peak]:
    """What is live at the peak. Repeated layers are combined."""
    totals: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for share in peak.shares:
        total = totals[generic(share.module), share.phase.name.lower(), share.source, share.category]
        total[0] += share.bytes
        total[1] += share.blocks
    rows = [
        Peak(module=module, phase=phase, source=source, category=category, bytes=size, blocks=count)
        for (module, phase, source, category), (size, count) in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, row.module, row.source, row.category))[:MOST_SHARES]
