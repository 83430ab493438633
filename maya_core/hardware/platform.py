"""What decides which kernels a call launches besides the call itself: the GPU, and the libraries that run on it."""

from __future__ import annotations

from dataclasses import dataclass

from maya_core.hardware.models import Gpu


@dataclass(frozen=True)
class Platform:
    """A GPU with the software of its day: torch 2.13, CUDA 13 and the cuDNN that torch ships with."""

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
