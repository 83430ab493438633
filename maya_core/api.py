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
from maya_core.report.prediction import Prediction
from maya_core.request import Request
from maya_core.session.block import EmulatedBlock, emulate
from maya_core.trace.job import JobTrace, read_job

__all__ = ["EmulatedBlock", "JobTrace", "MayaError", "Prediction", "emulate", "predict", "read_job", "what_if"]


def predict(job: JobTrace | str | Path, **options: Any) -> Prediction:
    """Predicts a recorded job on the cluster that it was recorded for. `job` may be the --out folder of a `maya run`; the options are those
    of `maya report`: tokens_per_step, network, price_per_gpu_hour, attention, host, profile and so on."""
    return pipeline.predict(_job(job), Request.of(**options))


def what_if(job: JobTrace | str | Path, **options: Any) -> Prediction:
    """Predicts a recorded job on other hardware, without running it again. The options are those of `maya what-if`: gpu, node, nodes,
    gpus_per_node, network, price_per_gpu_hour and those of `predict`."""
    recorded, request = _job(job), Request.of(**options)
    return pipeline.predict(recorded, request, pipeline.other_cluster(recorded, request))


def _job(job: JobTrace | str | Path) -> JobTrace:
    return job if isinstance(job, JobTrace) else read_job(Path(job))
