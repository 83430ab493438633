"""The fingerprint that pairs a prediction with its actual run: a digest of what both know about the job. It does not contain paths,
seeds, data or versions, or anything that only one of the two can know."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict

from maya_core.report.prediction import Prediction, Workload


class JobIdentity(BaseModel):
    """What both the predicted and the actual run know about a job."""

    model_config = ConfigDict(frozen=True)

    gpu: str  # the name in the catalog
    world_size: int
    gpus_per_node: int
    workload: Workload

    @property
    def fingerprint(self) -> str:
        content = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def parts(self) -> dict[str, str]:
        """The content of the fingerprint in short words, to show how two jobs differ."""
        work = self.workload
        shapes = hashlib.sha256(json.dumps(work.shapes, sort_keys=True).encode()).hexdigest()[:8]
        return {
            "GPU": self.gpu,
            "world size": str(self.world_size),
            "GPUs per node": str(self.gpus_per_node),
            "trained parameters": f"{work.trained_parameters:,}",
            "frozen parameters": f"{work.frozen_parameters:,}",
            "shapes of parameters": f"{sum(work.shapes.values())} ({shapes})",
            "autocast": work.autocast or "none",
            "inputs": (", ".join(work.inputs) or "none")[:500],
            "calls per step": str(work.calls_per_step),
            "sharding": ", ".join(work.sharding) or "none",
            "group sizes": ", ".join(map(str, work.group_sizes)) or "none",
        }


def predicted_job(prediction: Prediction) -> JobIdentity | None:
    if prediction.workload is None:
        return None
    return JobIdentity(
        gpu=prediction.cluster.gpu,
        world_size=prediction.world.size,
        gpus_per_node=prediction.world.gpus_per_node,
        workload=prediction.workload,
    )


HARDWARE = ("GPU", "world size", "GPUs per node")  # of the parts


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """How the parts of two jobs differ, in words."""
    return [f"{name} {one[name]} and {other[name]}" for name in one if name in other and one[name] != other[name]]
