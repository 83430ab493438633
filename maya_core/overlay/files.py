"""Switches the overlay of files on and off in a process and its children, and lists what a program has written.

Covered is everything but the folders of `untouched()`: devices, caches that hold what anyone could download or compile again, installed
packages, and Maya's own. In temporary folders, files and folders that the program makes are real; those that were there before are covered.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import site
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from maya_core.cpp_build import WARNINGS, cache_folder, compiled, run_compiler
from maya_core.errors import MayaError

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-shared", *WARNINGS)
# Children load the library before anything else: with a C++ library of its own, it does not decide which one they get.
ALONE = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
NAME = "maya_overlay.so"
VARIABLE = "MAYA_OVERLAY"  # the settings, for children; native/linker.cpp reads it
PRELOAD = "LD_PRELOAD"
SYSTEM = ("/dev", "/proc", "/sys", "/run", "/var/run")
CACHES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR", "CUDA_CACHE_PATH", "PYTHONPYCACHEPREFIX",
)  # fmt: skip
BLOCK = 1 << 24  # bytes that are copied at once
KEPT = "files"  # where they are kept on request, in the folder of the run
AT_HOME = (".cache", ".config", ".ipython", ".jupyter", ".local", ".nv", ".triton")


def untouched() -> list[str]:
    """Folders in which the program's files are real."""
    named = [os.environ[name] for name in CACHES if os.environ.get(name)]
    home = [str(Path.home() / name) for name in AT_HOME]
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    return [*SYSTEM, *named, *home, *installed, str(cache_folder())]


@functools.cache
def library() -> Path:
    """The compiled sources in native/."""
    digest = hashlib.sha256(" ".join((*FLAGS, *ALONE, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())

    def compile_in(folder: Path, binary: Path) -> None:
        sources = map(str, sorted(SOURCES.glob("*.cpp")))
        command = [*FLAGS, *sources, "-o", str(binary), "-ldl"]
        try:
            run_compiler([*command, *ALONE], "the overlay of files")
        except MayaError:  # not every system has the static library
            run_compiler(command, "the overlay of files")

    return compiled(f"overlay-{digest.hexdigest()[:16]}", NAME, "", compile_in)


def environment(folder: Path, untouched_too: Iterable[Path] = ()) -> dict[str, str]:
    """Variables with which a process, and what it starts, changes files only in `folder`. All processes of a run share the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder.stat().st_ctime_ns  # by the clock of file systems
    temporary = {tempfile.gettempdir(), "/tmp", "/var/tmp"}
    lines = [
        f"folder={os.path.realpath(folder)}",
        f"working={os.path.realpath(os.getcwd())}",
        f"begun={begun // 10**9}.{begun % 10**9:09d}",
        *(f"untouched={path}" for path in _real([*untouched(), *map(str, untouched_too)])),
        *(f"temporary={path}" for path in _real(temporary)),
    ]
    before = [each for each in os.environ.get(PRELOAD, "").split(":") if each and Path(each).name != NAME]
    return {VARIABLE: "\n".join(lines), PRELOAD: ":".join([_preloaded(folder), *before])}


def _preloaded(folder: Path) -> str:
    """The library's path for LD_PRELOAD, in which spaces and colons separate paths."""
    path = library()
    if set(" :") & set(str(path)):
        path = folder.absolute() / NAME
        if set(" :") & set(str(path)):
            raise MayaError(
                f"children of the program cannot find the overlay of files in {path}: there is a space or a colon in the path.",
                "Set MAYA_CACHE_DIR or TMPDIR to a folder without them.",
            )
        if not path.exists():
            path.symlink_to(library())
    return str(path)


def _real(paths: Iterable[str]) -> list[str]:
    return sorted({os.path.realpath(path) for path in paths})


def start(variables: Mapping[str, str]) -> Callable[[], None]:
    """Begins in this process what `environment` says; children need the variables themselves. Returns what ends it."""
    native = ctypes.CDLL(str(library()))
    native.maya_overlay_start.argtypes = [ctypes.c_char_p]
    if error := native.maya_overlay_start(os.fsencode(variables[VARIABLE])):
        raise MayaError(f"the overlay of files cannot be used: {os.strerror(error)}.", "Is the temporary folder full?")
    stop: Callable[[], None] = native.maya_overlay_stop
    return stop


def is_on() -> bool:
    """Whether this process, from its start, changes no files of the user's."""
    return VARIABLE in os.environ


def aside() -> Path | None:
    """A folder whose files are real, for what does not go through the C library; None if nothing is covered."""
    found = [line for line in os.environ.get(VARIABLE, "").splitlines() if line.startswith("folder=")]
    return Path(found[0].removeprefix("folder=")) if found else None


@dataclass(frozen=True)
class Written:
    """A file that a program wrote, and that was not kept."""

    path: Path  # as the program sees it
    bytes: int


def written(folder: Path) -> list[Written]:
    """What stands in an overlay."""
    root = folder / "files"
    found = []
    for place, _, names in os.walk(root):
        for name in names:
            path = Path(place, name)
            found.append(Written(Path("/") / path.relative_to(root), path.lstat().st_size))
    return sorted(found, key=lambda each: each.path)


def keep(folder: Path, target: Path) -> None:
    """Moves what stands in an overlay to a folder of the user's. Holes in checkpoints stay holes."""
    if (folder / "files").exists():
        try:
            os.rename(folder / "files", target)
        except OSError:  # another file system
            shutil.copytree(folder / "files", target, symlinks=True, copy_function=_copy_with_holes)


def _copy_with_holes(source: str, target: str) -> None:
    size = os.stat(source).st_size
    with open(source, "rb") as old, open(target, "wb") as new:
        new.truncate(size)
        begin = 0
        while begin < size:
            try:
                begin = os.lseek(old.fileno(), begin, os.SEEK_DATA)
            except OSError:  # only a hole is left
                return
            end = os.lseek(old.fileno(), begin, os.SEEK_HOLE)
            while begin < end and (data := os.pread(old.fileno(), min(end - begin, BLOCK), begin)):
                begin += os.pwrite(new.fileno(), data, begin)
