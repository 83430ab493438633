"""A recorded job on other hardware: where the program itself would not change, its trace tells without running it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from maya_core.errors import MayaError
from maya_core.hardware.cluster import Cluster, cluster
from maya_core.report import wording
from maya_core.report.prediction import Prediction
from maya_core.report.terminal import plain_table
from maya_core.trace.job import JobTrace


def recorded_cluster(job: JobTrace, *, network: str | None = None, price_per_gpu_hour: float | None = None) -> Cluster:
    """The cluster a job was recorded for, but for what is given otherwise."""
    return cluster(
        next(iter(job.ranks.values())).meta["gpu"],
        job.gpus_per_node,
        job.nodes,
        node=job.node,
        network=network or job.network,
        price_per_gpu_hour=price_per_gpu_hour,
    )


def other_cluster(
    job: JobTrace,
    *,
    gpu: str | None,
    node: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    network: str | None,
    price_per_gpu_hour: float | None,
) -> Cluster:
    """The cluster asked for, if the job's program would be the same on it."""
    recorded = next(iter(job.ranks.values())).meta["gpu"]
    per_node = gpus_per_node or job.gpus_per_node
    needed = -(-job.world_size // per_node)
    count = nodes or needed
    if count != needed:
        _refuse(job, gpu or (None if node else recorded), count, per_node)
    same = gpu is None and node is None  # then node and network are the recorded ones, too
    return cluster(
        gpu or (None if node else recorded),
        per_node,
        count,
        node=job.node if same and per_node == job.gpus_per_node else node,
        network=network or (job.network if same else None),
        price_per_gpu_hour=price_per_gpu_hour,
    )


def _refuse(job: JobTrace, gpu: str | None, nodes: int, per_node: int) -> None:
    command = shlex.join(job.command) if job.command else "COMMAND"
    words = ["maya", "run", *(["--gpu", gpu] if gpu else [])]
    if job.command and "torchrun" in job.command[0]:
        advice = f"{' '.join(words)} -- {command}   # with --nnodes {nodes} --nproc-per-node {per_node}"
    else:
        advice = f"{' '.join(words)} --nodes {nodes} --gpus-per-node {per_node} -- {command}"
    if job.world_size % nodes == 0:
        advice += f"\nThe same GPUs in {nodes} nodes: add --gpus-per-node {job.world_size // nodes}."
    raise MayaError(
        f"{nodes} node{'s' * (nodes != 1)} of {per_node} are {nodes * per_node:,} GPUs, and the job was recorded on {job.world_size:,}: "
        "with another world size the program itself would change (batches, shards, groups).",
        f"Emulate it anew: {advice}",
    )


def comparison(names: list[str], predictions: list[Prediction]) -> Table:
    """Predictions side by side, the first being what the others are held against."""
    table = plain_table("", "", *(f">{name}" for name in names))
    first = predictions[0]

    def row(heading: str, values: list[str]) -> None:
        if any(value != "-" for value in values):
            table.add_row(heading, *values)

    def faster(prediction: Prediction) -> str:
        if not prediction.step_time_s or not first.step_time_s:
            return "-"
        change = "" if prediction is first else f" ({first.step_time_s / prediction.step_time_s:.2f} x)"
        return wording.seconds(prediction.step_time_s) + change

    row("step time", [faster(each) for each in predictions])
    row("tokens/s", [wording.count(each.tokens_per_s) if each.tokens_per_s else "-" for each in predictions])
    row("samples/s", [wording.count(each.samples_per_s) if each.samples_per_s else "-" for each in predictions])
    row("MFU", [f"{each.mfu:.1%}" if each.mfu is not None else "-" for each in predictions])
    row("exposed communication", [_share(each, "exposed_communication_s") for each in predictions])
    row("waiting", [_share(each, "waiting_s") for each in predictions])
    row("cost per 1,000 steps", [_dollars(each) for each in predictions])
    row("memory", [_memory(each) for each in predictions])
    row(
        "known well",
        [
            f"{each.confidence.measured + each.confidence.interpolated:.0%}" if each.confidence else "-"
            for each in predictions
        ],
    )
    return table


def notes(recorded: Prediction, others: Iterable[Prediction]) -> Group:
    """What there is to weigh on other hardware that is not on the recorded one."""
    told = dict.fromkeys(caveat for prediction in others for caveat in prediction.caveats)
    return Group(*(Text(f"Note: {caveat}", style="yellow") for caveat in told if caveat not in recorded.caveats))


def _share(prediction: Prediction, name: str) -> str:
    if prediction.world.size == 1 or prediction.time is None or not prediction.step_time_s:
        return "-"
    return f"{getattr(prediction.time, name) / prediction.step_time_s:.1%}"


def _dollars(prediction: Prediction) -> str:
    cost = prediction.cost
    return wording.money(cost.usd_per_1k_steps) if cost and cost.usd_per_1k_steps is not None else "-"


def _memory(prediction: Prediction) -> str:
    fullest = prediction.memory.fullest
    if fullest is None:
        return "-"
    fits = {True: "fits", False: "does not fit", None: "not known to fit"}[prediction.memory.fits]
    return f"{wording.size(fullest.peak_reserved_bytes + fullest.outside_allocator_bytes)} of {wording.size(fullest.capacity_bytes)}, {fits}"
