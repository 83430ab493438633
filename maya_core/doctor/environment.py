"""Looks at what every run needs: Python, Maya's own installation, torch, the compiler, the cache and the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

from maya_core.cpp_build import cache_folder, compiler
from maya_core.device import build
from maya_core.doctor.findings import Finding, State
from maya_core.errors import MayaError
from maya_core.installation import Installation, installation, version_of
from maya_core.report import wording
from maya_core.torch_seam import version as torch_versions
from maya_core.version import PACKAGE, __version__

GIB = 2**30
LEAST_DISK = GIB // 2  # the device is compiled into 10 MB; traces of large jobs have some 100 MB
LEAST_MEMORY = GIB  # of an emulated rank, without what the program keeps on the host
ACCEPTS_CPP20 = ("-std=c++20", "-x", "c++", "-E", "-include", "version", "-include", "compare", os.devnull)
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def python_and_maya() -> list[Finding]:
    own = installation()
    found = [Finding("Python", f"{platform.python_version()}, {sys.executable}"), maya(own), autoload()]
    if sys.platform != "linux":
        found.insert(
            0,
            Finding(
                "system",
                f"{sys.platform}: Maya runs on Linux only",
                State.PROBLEM,
                "Use Linux, for example in a container.",
            ),
        )
    return found


def maya(own: Installation) -> Finding:
    where = f"{__version__}, {own}"
    if not own.registered:
        return Finding("Maya", where, State.PROBLEM, f"Run: {own.install_line()}")
    if own.elsewhere is not None:
        other = f"{where}, but imported from {PACKAGE.parent}"
        advice = f"Remove {PACKAGE.parent} from PYTHONPATH, unless you want to run that Maya."
        return Finding("Maya", other, State.WARNING, advice)
    return Finding("Maya", where)


def autoload() -> Finding:
    """Whether torch will load the emulated device by itself."""
    if os.environ.get(AUTOLOAD) == "0":
        return Finding(
            "autoload",
            f"{AUTOLOAD}=0 is set",
            State.PROBLEM,
            f"Unset {AUTOLOAD}: torch would not load the emulated device.",
        )
    if "maya" not in entry_points(group="torch.backends").names:
        problem = "torch does not find Maya: the entry point 'maya' of the group torch.backends is missing"
        return Finding("autoload", problem, State.PROBLEM, f"Install Maya: {installation().install_line()}")
    return Finding("autoload", "torch loads the emulated device under `maya run`")


def torch() -> list[Finding]:
    try:
        found = torch_versions.installed()
    except MayaError as error:
        return [Finding("torch", error.problem, State.PROBLEM, error.advice)]
    except (OSError, KeyError, SyntaxError) as error:
        problem = f"its version cannot be read: {error}"
        return [Finding("torch", problem, State.PROBLEM, f"Install it again: {torch_versions.INSTALL}")]
    kind = f"built for CUDA {found.cuda}" if found.cuda else "CPU build"
    what = f"{found.text}, {kind}, {found.folder}"
    try:
        found.check()
    except MayaError as error:
        return [Finding("torch", f"{what}: {error.problem}", State.PROBLEM, error.advice)]
    compared = torch_versions.text(torch_versions.COMPARED)
    this = torch_versions.text(found.version)
    how = f"Maya's kernels and memory were compared with CUDA PyTorch {this}"
    if found.version != torch_versions.COMPARED:
        how += f": ops and training scripts on one GPU. Distributed and compiled programs were compared with {compared} only"
    return [Finding("torch", what), Finding("compared", how)]


def compiling() -> list[Finding]:
    """The compiler and the headers. They are only needed while something is not compiled yet, or after an update of torch or Maya."""
    found = []
    try:
        program = compiler()
        found.append(_compiler(program))
    except MayaError as error:
        found.append(Finding("C++ compiler", error.problem, State.PROBLEM, error.advice))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.exists():
        found.append(Finding("Python headers", str(header)))
    else:
        advice = f"Install them (Debian/Ubuntu: apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev; Fedora: dnf install python3-devel)."
        found.append(Finding("Python headers", f"{header} does not exist", State.PROBLEM, advice))
    if (make := shutil.which("make")) is not None:
        found.append(Finding("make", make))
    else:
        found.append(
            Finding(
                "make", "not installed; Megatron-LM compiles its helpers with it, Maya does not need it", State.ABSENT
            )
        )
    return found


def _compiler(program: str) -> Finding:
    path = shutil.which(program) or program
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=True).stdout
        knows = subprocess.run([path, *ACCEPTS_CPP20], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "C++ compiler",
            f"{path} does not run: {error}",
            State.PROBLEM,
            "Install g++, or point CXX at a compiler that works.",
        )
    what = f"{version.partition(chr(10))[0].strip()}, {path}"
    if knows.returncode:
        return Finding(
            "C++ compiler",
            f"{what}: it does not know C++20",
            State.PROBLEM,
            "Install g++ 11 or newer, or point CXX at one.",
        )
    return Finding("C++ compiler", what)


def cache() -> list[Finding]:
    folder = cache_folder()
    there = _existing(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    found = [Finding("folder", f"{folder}, {wording.size(size)}")]
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        advice = "Point MAYA_CACHE_DIR at a folder that you may write to."
        found = [Finding("folder", f"{folder}: {there} is not writable", State.PROBLEM, advice)]
    if version_of("torch") is not None:
        found.append(_compiled_device(folder))
    free = shutil.disk_usage(there).free
    if free < LEAST_DISK:
        advice = "Free some space, or point MAYA_CACHE_DIR at another disk."
        return [*found, Finding("free disk", wording.size(free), State.WARNING, advice)]
    return [*found, Finding("free disk", wording.size(free))]


def _compiled_device(folder: Path) -> Finding:
    try:
        text = torch_versions.installed().text
    except (MayaError, OSError, KeyError, SyntaxError):
        return Finding("device", "unknown, because torch's version is", State.ABSENT)
    if (folder / build.build_key(text) / f"{build.MODULE}.so").exists():
        return Finding("device", f"compiled for torch {text}")
    return Finding(
        "device", f"not compiled for torch {text} yet: the first run does it, in one to two minutes", State.ABSENT
    )


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    found = [Finding("cores", str(cores))]
    available = _available_memory()
    if available is None:
        return found
    if available < LEAST_MEMORY:
        advice = (
            "An emulated rank needs a few hundred MB, and what its program keeps on the host: emulate fewer `--ranks`."
        )
        return [*found, Finding("memory", f"{wording.size(available)} available", State.WARNING, advice)]
    return [*found, Finding("memory", f"{wording.size(available)} available")]


def _available_memory() -> int | None:
    """What processes may still allocate: of the machine, or of the container if that has less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    if kib is None:
        return None
    group = Path("/sys/fs/cgroup")
    try:
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit
        return kib * 1024
    return max(0, min(left, kib * 1024))
