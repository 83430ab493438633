"""The names of metrics, parameters and tags. They are the same for predicted and actual runs, so that both share rows in MLflow's
compare view. docs/mlflow.md lists them."""

from __future__ import annotations

import json
import math
from typing import Literal

from maya_core.report.prediction import Prediction
from maya_mlflow.fingerprint import JobIdentity

Kind = Literal["predicted", "actual"]

KIND = "maya.run_kind"
FINGERPRINT = "maya.fingerprint"
PAIR = "maya.pair_id"
JOB = "maya.job"  # the content of the fingerprint as JSON, to show how two jobs differ
UPLOAD = "maya.upload_id"  # identifies the folder of the draft, so that sending it twice creates one run
COMPLETE = "maya.upload"  # 'complete' once everything has arrived
PROFILE = "maya.calibration"
ENDED = "maya.ended"
CAVEATS = "maya.caveats"
MOST_CHARACTERS = 5000  # of a tag, also in older versions of MLflow

STEP_TIME = "maya/step_time_s"
PEAK_ALLOCATED = "maya/peak_allocated_mb"
PEAK_RESERVED = "maya/peak_reserved_mb"
SAMPLES = "maya/samples_per_s"
TOKENS = "maya/tokens_per_s"
TOKENS_PER_GPU = "maya/tokens_per_s_per_gpu"
COST = "maya/usd_per_1k_steps"
STEPS = "maya/steps_timed"  # only for actual runs, like the next one
SPREAD = "maya/step_time_iqr_pct"
ERROR = "error/{}_pct"

MB = 1e6  # as MLflow defines a megabyte

# The metrics that `maya compare` compares: predicted and actual runs both have them. (MLflow's own GPU metrics are means over time
# and over everything that runs there, so they are shown but not compared.)
COMPARED = (STEP_TIME, SAMPLES, TOKENS, PEAK_ALLOCATED, PEAK_RESERVED)


def error_key(key: str) -> str:
    return ERROR.format(key.partition("/")[2])


def predicted_metrics(prediction: Prediction) -> dict[str, float]:
    """All known figures of a prediction."""
    found: dict[str, float | None] = {
        STEP_TIME: prediction.step_time_s,
        SAMPLES: prediction.samples_per_s,
        TOKENS: prediction.tokens_per_s,
        TOKENS_PER_GPU: prediction.tokens_per_s_per_gpu,
        "maya/mfu": prediction.mfu,
        "maya/hfu": prediction.hfu,
    }
    if (time := prediction.time) is not None:
        found |= {
            f"maya_predicted/{name}": getattr(time, name)
            for name in ("compute_s", "exposed_communication_s", "waiting_s", "copy_s", "host_s")
        }
    if (cost := prediction.cost) is not None:
        found |= {COST: cost.usd_per_1k_steps, "maya/usd_per_epoch": cost.usd_per_epoch}
    if prediction.energy is not None:
        found["maya/kwh_per_1k_steps"] = prediction.energy.kwh_per_1k_steps
    if (known := prediction.confidence) is not None:
        found |= {
            f"maya_predicted/confidence_{name}": getattr(known, name)
            for name in ("measured", "interpolated", "extrapolated", "bound")
        }
    found |= _memory(prediction) | _system(prediction)
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _memory(prediction: Prediction) -> dict[str, float | None]:
    """The highest peaks of all GPUs, as the recorder determines them."""
    gpus = prediction.memory.ranks
    return {
        PEAK_ALLOCATED: max((gpu.peak_allocated_bytes for gpu in gpus), default=0) / MB or None,
        PEAK_RESERVED: max((gpu.peak_reserved_bytes for gpu in gpus), default=0) / MB or None,
    }


def _system(prediction: Prediction) -> dict[str, float | None]:
    """Values under MLflow's own names for system metrics: what NVML would report for the first emulated rank's GPU."""
    found: dict[str, float | None] = {}
    gpus = [gpu for gpu in prediction.memory.ranks if gpu.rank == min(prediction.world.emulated_ranks)]
    for gpu in gpus:
        used = gpu.peak_reserved_bytes + gpu.outside_allocator_bytes
        name = f"system/gpu_{gpu.device}_memory_usage"
        found |= {f"{name}_megabytes": used / MB, f"{name}_percentage": 100 * used / gpu.capacity_bytes}
    time = prediction.time
    for gpu in gpus if time is not None and prediction.step_time_s else ():
        busy = 1 - min(1.0, (time.host_s + time.copy_s) / prediction.step_time_s)  # type: ignore[union-attr, operator]
        found[f"system/gpu_{gpu.device}_utilization_percentage"] = 100 * busy
    if (energy := prediction.energy) is not None:
        limit = prediction.cluster.power_limit_w
        for gpu in gpus:
            found[f"system/gpu_{gpu.device}_power_usage_watts"] = energy.average_w_per_gpu
            found[f"system/gpu_{gpu.device}_power_usage_percentage"] = 100 * energy.average_w_per_gpu / limit
    return found


def job_params(job: JobIdentity | None) -> dict[str, str]:
    """The parameters of both kinds of run."""
    if job is None:
        return {}
    work = job.workload
    return {
        "maya/gpu": job.gpu,
        "maya/world_size": str(job.world_size),
        "maya/gpus_per_node": str(job.gpus_per_node),
        "maya/parameters": str(work.trained_parameters + work.frozen_parameters),
        "maya/trained_parameters": str(work.trained_parameters),
        "maya/precision": _precision(job),
        "maya/inputs": ", ".join(work.inputs),
        "maya/calls_per_step": str(work.calls_per_step),
        "maya/sharding": ", ".join(work.sharding) or "none",
        "maya/group_sizes": ", ".join(map(str, work.group_sizes)) or "none",
    }


def _precision(job: JobIdentity) -> str:
    dtypes = sorted({shape.split()[1] for shape in job.workload.shapes})
    return "/".join(dtypes) + (f", autocast {job.workload.autocast}" if job.workload.autocast else "")


def predicted_params(prediction: Prediction) -> dict[str, str]:
    work, world = prediction.throughput, prediction.world
    known: dict[str, object] = {
        "maya/gpu": prediction.cluster.gpu,
        "maya/world_size": world.size,
        "maya/nodes": world.nodes,
        "maya/gpus_per_node": world.gpus_per_node,
        "maya/node": prediction.cluster.node,
        "maya/network": prediction.cluster.network,
        "maya/data_parallel": work.data_parallel,
        "maya/samples_per_step": work.samples_per_step,
        "maya/tokens_per_step": work.tokens_per_step,
        "maya/emulated_ranks": len(world.emulated_ranks),
        "maya/host": prediction.assumptions.host,
        "maya/attention": prediction.assumptions.attention,
        "maya/calibration": prediction.assumptions.calibration or "none",
        "maya/torch": prediction.trace.torch,
        "maya/python": prediction.trace.python,
        "maya/version": prediction.maya,
    }
    return {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in known.items()
        if value is not None
    }


def predicted_tags(prediction: Prediction, job: JobIdentity | None, pair: str) -> dict[str, str]:
    """The tags of a predicted run. They also show whether the program failed or would hang."""
    tags = job_tags("predicted", job, pair)
    fits = prediction.memory.fits
    tags["maya.fits"] = "unknown" if fits is None else str(fits).lower()
    if prediction.caveats:
        tags[CAVEATS] = "\n".join(prediction.caveats)[:MOST_CHARACTERS]
    tags[ENDED] = "hung" if prediction.hangs else prediction.trace.ended
    if prediction.assumptions.calibration:
        tags[PROFILE] = prediction.assumptions.calibration
    return tags


def job_tags(kind: Kind, job: JobIdentity | None, pair: str) -> dict[str, str]:
    tags = {KIND: kind, PAIR: pair}
    if job is not None:
        tags |= {FINGERPRINT: job.fingerprint, JOB: json.dumps(job.parts)}
    return {name: value for name, value in tags.items() if value}
