"""From a recorded job to its prediction: cluster, durations, timeline, prediction, outputs. This is the one way, and everybody takes it:
commands, blocks, plugins, trials, gates and integrations.

    prediction = predict(read_job("maya-out"), Request(tokens_per_step=4e6))

Recording the job comes before (`launch`, `session`); pictures and tables come after (`report`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from maya_core.errors import MayaError
from maya_core.hardware.cluster import Cluster, cluster
from maya_core.predictor.calibration import load_calibration
from maya_core.predictor.pricing import TraceDurations
from maya_core.report import analysis
from maya_core.report.analysis import Analysis
from maya_core.report.outputs import Outputs
from maya_core.report.prediction import Prediction
from maya_core.report.summary import summarize
from maya_core.request import Request
from maya_core.trace.job import JobTrace


def recorded_cluster(job: JobTrace, request: Request | None = None) -> Cluster:
    """The cluster that a job was recorded for, with the network and the price of the request."""
    request = request or Request()
    return cluster(
        job.gpu,
        job.gpus_per_node,
        job.nodes,
        node=job.node,
        network=request.network or job.network,
        price_per_gpu_hour=request.price_per_gpu_hour,
    )


def other_cluster(job: JobTrace, request: Request) -> Cluster:
    """The requested cluster, if the job's program would be the same on it."""
    per_node = request.gpus_per_node or job.gpus_per_node
    needed = -(-job.world_size // per_node)
    count = request.nodes or needed
    gpu = request.gpu or (None if request.node else job.gpu)
    if count != needed:
        _refuse(job, gpu, count, per_node)
    same = request.gpu is None and request.node is None  # then node and network are the recorded ones, too
    return cluster(
        gpu,
        per_node,
        count,
        node=job.node if same and per_node == job.gpus_per_node else request.node,
        network=request.network or (job.network if same else None),
        price_per_gpu_hour=request.price_per_gpu_hour,
    )


def analyse(
    job: JobTrace,
    request: Request | None = None,
    machine: Cluster | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Analysis:
    """Prices the job and simulates it, with the user's own calibration of the GPU. Without a `machine`, on the recorded cluster."""
    request = request or Request()
    machine = machine or recorded_cluster(job, request)
    return analysis.analyse(job, machine, request, load_calibration(machine.gpu, request.profile), progress)


def durations(job: JobTrace, request: Request, machine: Cluster) -> dict[int, TraceDurations]:
    """What every call of every rank takes on that cluster, without a simulation."""
    return analysis.price(job, machine, request, load_calibration(machine.gpu, request.profile))


def predict(job: JobTrace, request: Request | None = None, machine: Cluster | None = None) -> Prediction:
    return summarize(analyse(job, request, machine))


def report(job: JobTrace, request: Request, outputs: Outputs, machine: Cluster | None = None) -> Prediction:
    """Predicts, prints the prediction, writes the files that were asked for and logs it to trackers."""
    outputs.check_rank(job)
    with _progress() as progress:
        analysed = analyse(job, request, machine, progress)
        progress("summarizing")
        prediction = summarize(analysed)
    outputs.show(analysed, prediction)
    with _progress() as progress:
        written = list(outputs.write(analysed, prediction, progress))
    outputs.log(analysed, prediction, written)
    return prediction


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on a terminal what is being done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("maya") as status:
        yield lambda what: status.update(f"maya: {what} ...")


def _refuse(job: JobTrace, gpu: str | None, nodes: int, per_node: int) -> None:
    command = shlex.join(job.command) if job.command else "COMMAND"
    words = ["maya", "run", *(["--gpu", gpu] if gpu else [])]
    if job.command and "torchrun" in job.command[0]:
        advice = f"{' '.join(words)} -- {command}   # with --nnodes {nodes} --nproc-per-node {per_node}"
    else:
        advice = f"{' '.join(words)} --nodes {nodes} --gpus-per-node {per_node} -- {command}"
    if job.world_size % nodes == 0:
        advice += f"\nTo spread the same GPUs over {nodes} nodes, add --gpus-per-node {job.world_size // nodes}."
    raise MayaError(
        f"{nodes} node{'s' * (nodes != 1)} of {per_node} are {nodes * per_node:,} GPUs, but the job was recorded on {job.world_size:,}: "
        "with another world size the program itself would change (batches, shards, groups).",
        f"Emulate it again: {advice}",
    )
