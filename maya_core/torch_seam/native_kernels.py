"""Kernels that torch itself writes in Triton and prefers for some calls of an op (torch._native): in torch 2.13 to 2.15.

A CUDA build registers them when it is imported, over the kernels of its libraries. They call these for all other calls.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from types import ModuleType

from maya_core.torch_seam.names import Name
from maya_core.torch_seam.version import installed

REGISTRY = "torch._native.registry"
REGISTERED = (
    Name(REGISTRY, "_aten_override_libs", since=(2, 13), until=(2, 15)),
    Name(REGISTRY, "_override_libs", since=(2, 15)),
)
DESCRIBED = Name(REGISTRY, "_graphs", since=(2, 12))
IN_COMPILED_CODE = Name(REGISTRY, "_native_decomp_overrides", since=(2, 13))
REGISTER = Name(REGISTRY, "_register_all_overrides", since=(2, 12))
NAMES = REGISTERED


def imported() -> bool:
    """Whether torch has registered its kernels, or found that it is a CPU build. It does so at the end of its import."""
    return installed().version >= (2, 13) and REGISTRY in sys.modules


def register() -> None:
    """Lets torch register its kernels again, over the kernels that are registered now. A CPU build first looks again for a GPU."""
    remove()
    if installed().cuda is None:
        _describe_again()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # as torch does
        REGISTER.get()()


def remove() -> None:
    """Removes torch's kernels from the dispatcher."""
    registered = next(name for name in REGISTERED if name.expected).get()
    for library in registered.values():
        library._destroy()
    registered.clear()


def _describe_again() -> None:
    DESCRIBED.get().clear()
    IN_COMPILED_CODE.get().clear()
    for name in ("torch._native.triton_utils", "torch._native.cutedsl_utils"):
        for value in vars(sys.modules[name]).values():
            if isinstance(value, functools._lru_cache_wrapper):  # whether a GPU is there
                value.cache_clear()
    for folder in list(vars(importlib.import_module("torch._native.ops")).values()):
        if isinstance(folder, ModuleType):
            importlib.reload(folder)
