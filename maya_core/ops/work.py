"""What a call does on the device: the kernels it launches, and its allocations in the order the real kernel makes them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from maya_core.ops.kernel import Kernel
from maya_core.ops.traffic import relaid
from maya_core.trace.call import Tensor


class Step(enum.IntEnum):
    """A step of a call's allocations. native/dispatch.h has the same numbers; tests/ops holds the two together."""

    OUTPUT = 0
    TEMPORARY = 1
    FREE = 2
    BLAS_WORKSPACE = 3
    HOST_OUTPUT = 4
    STORAGE = 5


@dataclass
class Work:
    """Kernels launched and memory taken, written down in the order they happen.

    Outputs not named in the program are made after it; temporaries not freed in it live until the op ends.
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
        """Outputs that the op makes in host memory."""
        self.program += [(Step.HOST_OUTPUT, index) for index in indices]
        return self

    def storage(self, nbytes: int) -> Work:
        """The next output lies in an allocation of this size, whatever its own."""
        self.program.append((Step.STORAGE, nbytes))
        return self

    def temporary(self, nbytes: int) -> int:
        """Allocates, and returns the number to free it by."""
        self.program.append((Step.TEMPORARY, nbytes))
        self._temporaries += 1
        return self._temporaries - 1

    def free(self, *temporaries: int) -> Work:
        self.program += [(Step.FREE, index) for index in temporaries]
        return self

    def blas(self) -> Work:
        """The workspace of cuBLAS, which is kept from the first product on."""
        self.program.append((Step.BLAS_WORKSPACE, 0))
        return self

    def contiguous(self, source: Tensor | None) -> int | None:
        """Kernels that want their input contiguous copy it first. Returns the copy's number, None if it needs none."""
        if source is None or source.is_contiguous:
            return None
        copy = self.temporary(source.nbytes)
        self.launch(relaid(source, source.packed()))
        return copy
