"""Maya predicts what a training job will do to its GPUs, before any GPU is reserved.

    import maya_core

    with maya_core.emulate("h100") as job:
        train()
    print(job.prediction)

The names below are the public interface; `maya_core.api` documents them.
"""

from typing import TYPE_CHECKING, Any

from maya_core.version import __version__

__all__ = [
    "EmulatedBlock",
    "JobTrace",
    "MayaError",
    "Prediction",
    "__version__",
    "emulate",
    "predict",
    "read_job",
    "step",
    "what_if",
]

if TYPE_CHECKING:
    from maya_core.api import EmulatedBlock, JobTrace, MayaError, Prediction, emulate, predict, read_job, step, what_if


def __getattr__(name: str) -> Any:
    # torch imports this package with every `import torch` (session/autoload.py), so nothing heavy may come with it.
    if name == "step":  # which stands in training programs, also where they run for real
        from maya_core.marking import step

        return step
    if name in __all__:
        from maya_core import api

        return getattr(api, name)
    raise AttributeError(f"module 'maya_core' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
