"""The platform of a call: the GPU and its libraries, which decide with the call itself which kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass

from maya_core.hardware.models import Gpu


@dataclass(frozen=True)
class Platform:
    """A GPU with torch 2.13, CUDA 13 and the cuDNN that torch ships with."""

    gpu: Gpu

    @property
    def sms(self) -> int:
        return self.gpu.sms

    @property
    def threads_per_sm(self) -> int:
        return self.gpu.max_threads_per_sm

    @property
    def capability(self) -> int:
        """90 for sm_90."""
        major, minor = self.gpu.compute_capability
        return major * 10 + minor
