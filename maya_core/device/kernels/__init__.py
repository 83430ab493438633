"""What each ATen op does on the device: how many kernels it launches and what memory it takes on the way.

The native device asks `Planner.plan` once per distinct call (an op and the metadata of its arguments) and keeps the
answer, so nothing here is on the hot path. Figures are those of torch 2.13's CUDA kernels; each module names the
ATen source file it follows.
"""

from maya_core.device.kernels.call import Call, Signature, Tensor, Work, kernel
from maya_core.device.kernels.planner import Planner

__all__ = ["Call", "Planner", "Signature", "Tensor", "Work", "kernel"]
