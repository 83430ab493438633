"""Where inductor and Triton keep what they made: a folder of Maya's own, so that the user's is neither read nor written, and a run
on a real GPU never finds what was decided here. And the caches in memory that hold answers about the device.
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

# What decides what is kept: how kernels are described, and the predictor that answers in the place of a clock.
DECIDING = ("torch_compile/*.py", "ops/*.py", "ops/*.txt", "predictor/*.py", "predictor/profiles/**/*.json")
# Modules whose cached functions answer for the device. Others' must stay: what registers patterns does so once.
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
    """Of the Triton that is installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def folder(gpu: Gpu) -> Path:
    digest = hashlib.sha256(gpu.model_dump_json().encode())  # one of the user's own may be another tomorrow
    for pattern in DECIDING:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    versions = f"torch{torch.__version__}-triton{triton_version()}-maya{__version__}"
    return cache_folder() / "inductor" / f"{versions}-{digest.hexdigest()[:12]}" / gpu.name


def install(gpu: Gpu, patches: Patches) -> Path:
    """Points both at the folder, for this process and those it starts."""
    where = folder(gpu)
    patches.put(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(where))
    patches.put(os.environ, "TRITON_CACHE_DIR", str(where / "triton"))
    return where


def forget_device() -> None:
    """Compiled code and answers about the device are of another one than what comes next: before an emulation, and after it."""
    tracer = sys.modules.get("torch._dynamo.convert_frame")
    if (
        tracer is not None and tracer.FRAME_COUNTER
    ):  # optimizers import dynamo, and compile nothing; a reset imports inductor
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
