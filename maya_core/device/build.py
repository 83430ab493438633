"""Compiles the native device against the installed torch, and loads it.

Finding or compiling the binary does not import torch: that takes a second, and `maya run` itself does not need it. The cache
of binaries is maya_core/cpp_build.py's.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from maya_core.cpp_build import WARNINGS, compiled, compiler, run_compiler
from maya_core.torch_seam.version import installed

SOURCES = Path(__file__).parent / "native"
MODULE = "maya_native"
WHAT = "the emulated device"
# The last flag: torch is built with the newer ABI of libstdc++, and compilers of some distributions default to the older one.
FLAGS = ("-O2", "-std=c++20", "-fPIC", *WARNINGS, f"-DTORCH_EXTENSION_NAME={MODULE}", "-D_GLIBCXX_USE_CXX11_ABI=1")


def _build_key(version: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cpp", ".h"}:
            digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join(FLAGS).encode())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"torch{version}-{python}-{platform.machine()}-{digest.hexdigest()[:16]}"


def _compile(folder: Path, binary: Path) -> None:
    root = installed().folder
    headers = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    includes = [f"-isystem{folder}" for folder in headers]  # system headers: only our own code is checked for warnings
    compiler()  # raises if there is none, before any thread starts
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(run_compiler, [*FLAGS, *includes, "-c", str(source), "-o", str(made)], WHAT)
            for source, made in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    run_compiler(["-shared", "-o", str(binary), *map(str, objects), *libraries], WHAT)


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_native: ModuleType | None = None


def library() -> Path:
    """The path of the binary, which is compiled now if it is not in the cache."""
    torch = installed()
    torch.check()
    notice = "compiling the emulated device, once for this torch (a minute or two) ..."
    return compiled(_build_key(torch.text), f"{MODULE}.so", notice, _compile)


def native() -> ModuleType:
    """The native module, loaded once in this process."""
    global _native
    if _native is None:
        import torch  # noqa: F401  # loads the libraries that the binary links to

        _native = _load(library())
    return _native
