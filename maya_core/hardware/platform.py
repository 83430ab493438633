"""The platform of a call: the GPU and its libraries, which decide with the call itself which kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass

from maya_core.hardware.models import Gpu
from maya_core.torch_seam.version import COMPARED, Version


@dataclass(frozen=True)
class Platform:
    """A GPU with the CUDA build of a version of torch, and the libraries that it ships with.

    What an op launches and allocates is described for the compared version. What differs in another version asks for it:
    `platform.since(2, 15)`.
    """

    gpu: Gpu
    torch: Version = COMPARED

    def since(self, major: int, minor: int) -> bool:
        """Whether torch is this version or a later one."""
        return self.torch >= (major, minor)

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
