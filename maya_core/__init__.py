"""Maya: what a training job will do to its GPUs, before any GPU is reserved.

import maya_core

with maya_core.emulate("h100") as job:
    train()
print(job.prediction)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["MayaError", "__version__", "emulate"]

if TYPE_CHECKING:
    from maya_core.errors import MayaError
    from maya_core.session.block import emulate


def __getattr__(name: str) -> Any:
    # torch loads this package on every `import torch` (launch/autoload.py): nothing heavy may come with it.
    if name == "emulate":
        from maya_core.session.block import emulate

        return emulate
    if name == "MayaError":
        from maya_core.errors import MayaError

        return MayaError
    raise AttributeError(f"module 'maya_core' has no attribute '{name}'")
