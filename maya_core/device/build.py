"""The native device: compiled for the torch that is installed, whose headers and libraries it needs."""

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

import torch

from maya_core.compiled import compiled, compiler, run_compiler
from maya_core.errors import MayaError

SOURCES = Path(__file__).parent / "native"
MODULE = "maya_native"
WHAT = "the emulated device"
SUPPORTED_TORCH = ((2, 13), (2, 14))  # from, up to but not including: the native device uses torch's C++ internals


def check_torch(version: str = torch.__version__) -> None:
    """Refuses a torch that the native device was not written for."""
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    first, beyond = SUPPORTED_TORCH
    if not first <= number < beyond:
        raise MayaError(
            f"torch {version} is not supported: the emulated device needs torch >= {first[0]}.{first[1]}, < {beyond[0]}.{beyond[1]}.",
            f"Install it with: pip install 'torch>={first[0]}.{first[1]},<{beyond[0]}.{beyond[1]}'",
        )


def _build_key() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cpp", ".h"}:
            digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join(_flags()).encode())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"torch{torch.__version__}-{python}-{platform.machine()}-{digest.hexdigest()[:16]}"


def _flags() -> list[str]:
    return [
        "-O2",
        "-std=c++20",
        "-fPIC",
        "-w",
        "-DTORCH_EXTENSION_NAME=" + MODULE,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]


def _compile(folder: Path, library: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [
        f"-I{root}/include",
        f"-I{root}/include/torch/csrc/api/include",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    compiler()  # its absence is better said before the threads start
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(run_compiler, [*_flags(), *includes, "-c", str(source), "-o", str(made)], WHAT)
            for source, made in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    run_compiler(["-shared", "-o", str(library), *map(str, objects), *libraries], WHAT)


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_native: ModuleType | None = None


def native() -> ModuleType:
    """The compiled device, built now if it is not in the cache."""
    global _native
    if _native is None:
        check_torch()
        notice = "compiling the emulated device, once for this torch (about a minute) ..."
        _native = _load(compiled(_build_key(), f"{MODULE}.so", notice, _compile))
    return _native
