"""The installed torch, and the versions that Maya supports. Nothing here imports torch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import runpy
from dataclasses import dataclass
from pathlib import Path

from maya_core.errors import MayaError

Version = tuple[int, int]
FIRST: Version = (2, 10)
LAST: Version = (2, 15)
# The version whose sources describe what an op launches and allocates, and how the allocator works. Its CUDA build was compared in every
# respect: ops, training scripts, distributed and compiled programs. Of the other versions, ops and training scripts were (docs/versions.md).
COMPARED: Version = (2, 13)
INSTALL = "pip install 'torch>=2.10,<2.16'"
# The Triton with which each version's CUDA build is released.
TRITON = {(2, 10): "3.6.0", (2, 11): "3.6.0", (2, 12): "3.7.1", (2, 13): "3.7.1", (2, 14): "3.8.0", (2, 15): "3.9.0"}


@dataclass(frozen=True)
class Torch:
    """An installation of torch."""

    text: str  # its version, as torch states it: 2.13.0+cpu
    folder: Path
    cuda: str | None  # the CUDA version that it was built with; None: a CPU build

    @property
    def version(self) -> Version:
        return numbers(self.text)

    def check(self) -> None:
        """Raises for a version that the emulated device was not written for."""
        if not FIRST <= self.version <= LAST:
            raise MayaError(
                f"torch {self.text} is not supported: the emulated device needs torch {text(FIRST)} to {text(LAST)}.",
                f"Install one of them: {INSTALL}",
            )


def numbers(text: str) -> Version:
    """(2, 13) of 2.13.0+cpu."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)))


def text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


@functools.cache
def installed() -> Torch:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise MayaError("torch is not installed in this environment.", f"Install it with: {INSTALL}")
    folder = Path(spec.origin).parent
    stated = runpy.run_path(str(folder / "version.py"))
    return Torch(str(stated["__version__"]), folder, stated.get("cuda"))
