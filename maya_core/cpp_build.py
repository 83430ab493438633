"""Compiles C++ on first use, into a private cache that is keyed by everything that the binary depends on.

The wheel stays pure Python, so whoever runs Maya needs a compiler. Two processes may need a binary at the same time: a build is locked,
happens in a temporary folder, and is moved into place as a whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from maya_core.errors import MayaError

WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Wshadow",
)  # of our own code: headers of torch and Python are system headers to the compiler


def cache_folder() -> Path:
    """The folder of binaries: `MAYA_CACHE_DIR`, or else the user's cache folder."""
    if given := os.environ.get("MAYA_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maya"


def compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        raise MayaError(
            f"no C++ compiler: '{name}' was not found, and parts of Maya are compiled on first use.",
            "Install one (Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or point CXX at yours.",
        )
    return found  # by its path, from which gcc finds its parts if there is no PATH


def run_compiler(arguments: list[str], what: str) -> None:
    """Runs the compiler, on `what` for the error message. `MAYA_WARNINGS_AS_ERRORS=1`, which the tests set, makes a warning fail
    the build; it is no part of a binary's key, because it does not change the binary."""
    strict = ["-Werror"] if os.environ.get("MAYA_WARNINGS_AS_ERRORS") == "1" else []
    command = [compiler(), *arguments, *strict]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MayaError(f"{what} did not compile.", f"Command: {' '.join(command)}\n{done.stderr.strip()[-4000:]}")


def compiled(key: str, name: str, notice: str, compile_in: Callable[[Path, Path], None]) -> Path:
    """The binary `name` under `key`. If it does not exist, `compile_in(folder, binary)` makes it in a temporary folder."""
    folder = cache_folder() / key
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        if not target.exists():
            if notice:
                print(f"maya: {notice}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                made = Path(aside) / name
                compile_in(Path(aside), made)
                made.rename(target)
    return target
