"""The public Python interface. `import maya_core` offers these names; everything else may change without notice.

with maya_core.emulate("h100", gpus_per_node=8) as job:
    train()
print(job.prediction)

job = maya_core.read_job("maya-out")
maya_core.what_if(job, gpu="b200").step_time_s
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maya_core import pipeline
from maya_core.errors import MayaError
from maya_core.hardware.catalog import hardware_file_in_use
from maya_core.marking import step
from maya_core.report.prediction import Prediction
from maya_core.request import ClusterOptions, PredictionOptions, Request, unknown_option
from maya_core.session.block import EmulatedBlock, emulate
from maya_core.trace.job import JobTrace, read_job

__all__ = ["EmulatedBlock", "JobTrace", "MayaError", "Prediction", "emulate", "predict", "read_job", "step", "what_if"]


REPORT = frozenset(PredictionOptions.model_fields) | {"network", "price_per_gpu_hour"}
WHAT_IF = frozenset(PredictionOptions.model_fields) | frozenset(ClusterOptions.model_fields)


def predict(job: JobTrace | str | Path, **options: Any) -> Prediction:
    """Predicts a recorded job on the cluster that it was recorded for.

        maya_core.predict("maya-out", tokens_per_step=4e6).tokens_per_s

    `job` is a `JobTrace` or the folder of a `maya run`. The options are those of `maya report`: tokens_per_step, network,
    price_per_gpu_hour, attention, host, profile and so on.
    """
    request = _request(options, REPORT)
    with hardware_file_in_use(request.hardware):
        return pipeline.predict(_job(job), request)


def what_if(job: JobTrace | str | Path, **options: Any) -> Prediction:
    """Predicts a recorded job on other hardware, without running it again.

        maya_core.what_if("maya-out", gpu="b200", network="roce-400").step_time_s

    The options are those of `maya what-if`: gpu, node, nodes, gpus_per_node, network, price_per_gpu_hour and those of `predict`. Hardware on
    which the program itself would do something else, such as another number of GPUs, is refused with a `MayaError` that names the
    command that emulates it.
    """
    request = _request(options, WHAT_IF)
    with hardware_file_in_use(request.hardware):
        recorded = _job(job)
        return pipeline.predict(recorded, request, pipeline.other_cluster(recorded, request))


def _request(options: dict[str, Any], known: frozenset[str]) -> Request:
    """A request from options that apply to a recorded job; others, such as `steps`, would be ignored silently."""
    for name in options:
        if name not in known:
            raise unknown_option(name, known)
    return Request.of(**options)


def _job(job: JobTrace | str | Path) -> JobTrace:
    return job if isinstance(job, JobTrace) else read_job(Path(job))
