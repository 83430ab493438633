"""The caches of inductor and Triton, in a folder of Maya's own: the user's caches are neither read nor written, and a run on a real GPU
never finds what was decided here.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from maya_core.cpp_build import cache_folder
from maya_core.hardware.catalog import Gpu
from maya_core.patches import Patches
from maya_core.version import PACKAGE, __version__

# The files that decide what is cached: how kernels are described, and the predictor, whose durations replace measurements.
DECIDING = ("torch_compile/*.py", "ops/*.py", "ops/*.txt", "predictor/*.py", "predictor/profiles/**/*.json")


def triton_version() -> str | None:
    """The version of the installed Triton, or None."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def folder(gpu: Gpu) -> Path:
    digest = hashlib.sha256(gpu.model_dump_json().encode())  # the user may change a GPU of their own
    for pattern in DECIDING:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    versions = f"torch{torch.__version__}-triton{triton_version()}-maya{__version__}"
    return cache_folder() / "inductor" / f"{versions}-{digest.hexdigest()[:12]}" / gpu.name


def install(gpu: Gpu, patches: Patches) -> Path:
    """Points inductor and Triton at the folder, for this process and its children."""
    where = folder(gpu)
    patches.put(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(where))
    patches.put(os.environ, "TRITON_CACHE_DIR", str(where / "triton"))
    return where
