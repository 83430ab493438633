"""What a call does on the device: the kernels that it launches, and its allocations in the order of the real kernel."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from maya_core.ops.kernel import Kernel
from maya_core.ops.traffic import relaid
from maya_core.trace.call import Tensor


class Step(enum.IntEnum):
    """A step of a call's allocations. native/dispatch.h has the same numbers; a test checks that they agree."""

    OUTPUT = 0
    TEMPORARY = 1
    FREE = 2
    BLAS_WORKSPACE = 3
    HOST_OUTPUT = 4
    STORAGE = 5
    LT_WORKSPACE = 6


@dataclass
class Work:
    """The kernels and allocations of a call, in order.

    Outputs that the program does not mention are allocated after it; temporaries that it does not free live until the op ends.
    """

    kernels: list[Kernel] = field(default_factory=list)
    program: list[tuple[int, int]] = field(default_factory=list)
    _temporaries: int = 0

    def launch(self, *kernels: Kernel) -> Work:
        self.kernels += kernels
        return self

    def out(self, *indices: int) -> Work:
        self.program += [(Step.OUTPUT, index) for index in indices]
        return self

    def host_out(self, *indices: int) -> Work:
        """Allocates outputs in host memory."""
        self.program += [(Step.HOST_OUTPUT, index) for index in indices]
        return self

    def storage(self, nbytes: int) -> Work:
        """Places the next output in an allocation of this size, whatever its own size is."""
        self.program.append((Step.STORAGE, nbytes))
        return self

    def temporary(self, nbytes: int) -> int:
        """Allocates a temporary, and returns the number with which it is freed."""
        self.program.append((Step.TEMPORARY, nbytes))
        self._temporaries += 1
        return self._temporaries - 1

    def free(self, *temporaries: int) -> Work:
        self.program += [(Step.FREE, index) for index in temporaries]
        return self

    def blas(self, nbytes: int) -> Work:
        """Allocates the workspace of cuBLAS, which is kept after the first product."""
        self.program.append((Step.BLAS_WORKSPACE, nbytes))
        return self

    def lt(self, nbytes: int) -> Work:
        """Allocates cublasLt's own workspace, which is kept, too."""
        self.program.append((Step.LT_WORKSPACE, nbytes))
        return self

    def contiguous(self, source: Tensor | None) -> int | None:
        """Copies an input for a kernel that needs it contiguous. Returns the number of the copy, or None if none is needed."""
        if source is None or source.is_contiguous:
            return None
        copy = self.temporary(source.nbytes)
        self.launch(relaid(source, source.packed()))
        return copy
