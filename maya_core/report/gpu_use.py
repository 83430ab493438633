"""Whether the job uses the GPUs that it has: GPUs on which nothing ran, and ranks that train apart from each other."""

from __future__ import annotations

from maya_core.trace.job import JobTrace
from maya_core.trace.memory_peaks import devices_used


def reserved_gpus(job: JobTrace) -> int:
    """All GPUs of the job's nodes. The user may have given the nodes more than the job has ranks."""
    given = max(trace.meta.get("node_gpus") or 0 for trace in job.ranks.values())
    return job.nodes * max(given, job.gpus_per_node)


def idle_gpus(job: JobTrace) -> int:
    """GPUs of the job's nodes on which nothing ran. Ranks that were not emulated are assumed to use as many as the others."""
    used = max(len(devices_used(trace)) for trace in job.ranks.values())
    return max(0, reserved_gpus(job) - used * job.processes)


def caveats(job: JobTrace) -> list[str]:
    return [*_idle(job), *_apart(job)]


def _idle(job: JobTrace) -> list[str]:
    idle, all_gpus = idle_gpus(job), reserved_gpus(job)
    if not idle:
        return []
    per_node = all_gpus // job.nodes
    who = f"the job has {job.processes} ranks, on {all_gpus} GPUs"
    if job.processes == 1:
        advice = f"Start a process for each GPU (torchrun --nproc-per-node {per_node}), or reserve fewer GPUs."
        who = f"the program is one process, which used {all_gpus - idle} of them. {advice}"
    cost = "" if all_gpus == job.world_size else f" Cost and MFU are those of {job.world_size}."
    return [f"{idle} of {all_gpus} GPUs did nothing: {who}{'' if who.endswith('.') else '.'}{cost}"]


def _apart(job: JobTrace) -> list[str]:
    """Ranks that train, but never communicate."""
    trained = any(trace.steps for trace in job.ranks.values())
    together = any(trace.collectives for trace in job.ranks.values())
    if job.processes == 1 or together or not trained:
        return []
    return [
        f"The {job.processes:,} ranks never communicate: each trains a model of its own. If they should train one together, the program lacks "
        "DistributedDataParallel, FSDP or the like."
    ]
