"""Finds which of the user's files a program read: its modules, configurations and data. A stored prediction is valid as long as
these files do not change."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from pathlib import Path

WHOLE = 16 << 20  # files up to this many bytes are identified by their content, larger ones by size and time

# Folders of the system and of Python. What is installed there is identified by its version.
NOT_THE_USERS = (
    *{os.path.realpath(path) for name, path in sysconfig.get_paths().items() if name != "data"},
    *("/dev", "/etc", "/proc", "/sys", "/usr/lib", "/usr/share"),
)


class FilesRead:
    """Records opened files until the process ends, because Python cannot remove an audit hook. It is therefore only used in Maya's own
    processes."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._written: set[str] = set()
        sys.addaudithook(self._note)

    def found(self) -> list[str]:
        """The paths of the user's files that were read and not written by the program itself."""
        modules = {name: str(getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items())}
        ours = {os.path.dirname(file) for name, file in modules.items() if name.startswith("maya_") and "." not in name}
        others = (*NOT_THE_USERS, *map(os.path.realpath, ours))
        written = {os.path.realpath(path) for path in self._written}
        paths = {os.path.realpath(path) for path in {*self._read, *modules.values()} if path} - written
        return sorted(
            path for path in paths if _is_a_source(path) and not path.startswith(tuple(f"{one}/" for one in others))
        )

    def _note(self, event: str, args: tuple[object, ...]) -> None:
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
    """A digest that is equal if the same versions are installed."""
    folders = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    names = sorted(name for folder in folders for name in os.listdir(folder) if name.endswith(".dist-info"))
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:24]


def stamp(path: str) -> str:
    """A digest that is equal for equal files."""
    try:
        status = os.stat(path)
        if status.st_size > WHOLE:
            return f"{status.st_size} bytes of {status.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:24]
    except OSError:
        return "not there"
