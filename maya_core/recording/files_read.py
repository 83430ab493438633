"""Which files of the user's a program read: its modules, configurations, data. What is kept of a run holds for as long as they are the same."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from pathlib import Path

WHOLE = 16 << 20  # files up to this many bytes are known by their contents, larger ones by size and time

# The system's, and Python's: what is installed there is known by its version.
NOT_THE_USERS = (
    *{os.path.realpath(path) for name, path in sysconfig.get_paths().items() if name != "data"},
    *("/dev", "/etc", "/proc", "/sys", "/usr/lib", "/usr/share"),
)


class FilesRead:
    """Listens from the moment it is made to the end of the process: Python cannot take back an audit hook. So it is for processes that are
    Maya's own."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._written: set[str] = set()
        sys.addaudithook(self._hear)

    def found(self) -> list[str]:
        """What was read and is not the program's own work, by path."""
        modules = {name: str(getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())}
        ours = {os.path.dirname(file) for name, file in modules.items() if name.startswith("maya_") and "." not in name}
        others = (*NOT_THE_USERS, *map(os.path.realpath, ours))
        written = {os.path.realpath(path) for path in self._written}
        paths = {os.path.realpath(path) for path in {*self._read, *modules.values()} if path} - written
        return sorted(
            path for path in paths if _is_a_source(path) and not path.startswith(tuple(f"{one}/" for one in others))
        )

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event != "open":
            return
        path, _, flags = args
        if isinstance(path, str | bytes | os.PathLike) and isinstance(flags, int):
            reads = flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_CREAT
            (self._read if reads else self._written).add(os.path.abspath(os.fsdecode(path)))


def _is_a_source(path: str) -> bool:
    return "__pycache__" not in path and os.path.isfile(path)


@functools.cache
def installed() -> str:
    """Equal where the same versions are installed."""
    folders = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    names = sorted(name for folder in folders for name in os.listdir(folder) if name.endswith(".dist-info"))
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:24]


def stamp(path: str) -> str:
    """Equal for equal files."""
    try:
        told = os.stat(path)
        if told.st_size > WHOLE:
            return f"{told.st_size} bytes of {told.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:24]
    except OSError:
        return "not there"
