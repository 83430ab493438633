"""The caches of inductor and Triton, in a folder of Maya's own: the user's caches are neither read nor written, and a run on a real GPU
never finds what was decided here. Also clears the caches in memory that depend on the device.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from maya_core.cpp_build import cache_folder
from maya_core.hardware.catalog import Gpu
from maya_core.patches import Patches
from maya_core.version import PACKAGE, __version__

# The files that decide what is cached: how kernels are described, and the predictor, whose durations replace measurements.
DECIDING = ("torch_compile/*.py", "ops/*.py", "ops/*.txt", "predictor/*.py", "predictor/profiles/**/*.json")
# Modules whose cached functions depend on the device. Other caches must stay: a function that registers patterns runs only once.
ABOUT_DEVICE = (
    "torch.utils._triton",
    "torch._dynamo.device_interface",
    "torch._inductor.utils",
    "torch._inductor.codecache",
    "torch._inductor.runtime.hints",
    "torch._inductor.runtime.runtime_utils",
    "torch._inductor.codegen.triton",
)


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


def forget_device() -> None:
    """Clears compiled code and cached answers about the device, before and after an emulation."""
    tracer = sys.modules.get("torch._dynamo.convert_frame")
    # Optimizers import dynamo without compiling anything, and a reset would import inductor.
    if tracer is not None and tracer.FRAME_COUNTER:
        torch._dynamo.reset()
    if inductor := sys.modules.get("torch._inductor.utils"):
        inductor.clear_caches()
    for module in filter(None, map(sys.modules.get, ABOUT_DEVICE)):
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in (module, *(one for one in classes if one.__module__ == module.__name__)):
            for value in list(vars(owner).values()):
                cached = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()
