"""Compiles the native device on first use, into a private cache keyed by everything the binary depends on.

The wheel stays pure Python: whoever runs Maya has a compiler, and torch brings the headers. Two processes may want
the device at once, so the build is locked, done aside and moved into place whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from maya_core.errors import MayaError

SOURCES = Path(__file__).parent / "native"
MODULE = "maya_native"
SUPPORTED_TORCH = ((2, 13), (2, 14))  # from, up to but not including: the native device uses torch's C++ internals


def cache_folder() -> Path:
    """Where compiled devices are kept: `MAYA_CACHE_DIR`, else the user's cache folder."""
    if given := os.environ.get("MAYA_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maya"


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


def _compiler() -> str:
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise MayaError(
            f"no C++ compiler: '{compiler}' was not found, and the emulated device is compiled on first use.",
            "Install one (Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or point CXX at yours.",
        )
    return compiler


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MayaError(
            "the emulated device did not compile.",
            f"Command: {' '.join(command)}\n{done.stderr.strip()[-4000:]}",
        )


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [
        f"-I{root}/include",
        f"-I{root}/include/torch/csrc/api/include",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    compiler = _compiler()
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(_run, [compiler, *_flags(), *includes, "-c", str(source), "-o", str(made)])
                for source, made in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        library = Path(folder) / target.name
        libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        _run([compiler, "-shared", "-o", str(library), *map(str, objects), *libraries])
        library.rename(target)


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
        folder = cache_folder() / _build_key()
        target = folder / f"{MODULE}.so"
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the kernel if we die
                if not target.exists():
                    print(
                        "maya: compiling the emulated device, once for this torch (about a minute) ...",
                        file=sys.stderr,
                        flush=True,
                    )
                    _compile(target)
        _native = _load(target)
    return _native
