"""Files that Maya writes: whole or not at all, and never over something that is not its own."""

from __future__ import annotations

import gzip
import os
from enum import Enum
from pathlib import Path

from maya_core.errors import MayaError

LOOKED_AT = 4096  # bytes at a file's start that hold its mark


class FileKind(Enum):
    """Kinds of files: a usual name, and the mark that shows that Maya wrote it."""

    PREDICTION = ("prediction.json", b'"format": "maya-prediction"')
    PAGE = ("report.html", b'<meta name="generator" content="Maya')
    TIMELINE = ("timeline.json", b'"maya": ')
    SNAPSHOT = ("snapshot.pickle", b"Maya memory snapshot")
    FIGURE = ("figure.png", b"Maya figure")
    BASELINE = ("baseline.json", b'"format": "maya-baseline"')
    JUNIT = ("maya.xml", b'<testsuites name="maya check">')
    MARKDOWN = ("maya.md", b"### Maya: predicted before any GPU is reserved")
    SEARCH = ("result.json", b'"format": "maya-search"')


def check_target(path: Path, kind: FileKind) -> None:
    """Refuses a path that cannot be written, or that holds something else. To be called before any work is done."""
    name, mark = kind.value
    if path.is_dir():
        raise MayaError(f"{path} is a folder, not a file for {name}.", f"Give a file's name: {path}/{name}")
    if not path.parent.is_dir():
        raise MayaError(f"there is no folder {path.parent} for {path.name}.", "Make it, or give another path.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise MayaError(f"{path} cannot be written: permission denied.", "Give another path.")
    if path.exists() and path.stat().st_size and mark not in _start(path):
        raise MayaError(
            f"{path} exists and was not written by Maya: it will not be overwritten.",
            f"Give another name for {name}, or remove the file.",
        )


def _start(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(LOOKED_AT)
    except (OSError, EOFError):
        return b""


def write_file(path: Path, content: str | bytes, kind: FileKind) -> None:
    check_target(path, kind)
    data = content.encode() if isinstance(content, str) else content
    part = path.with_name(path.name + ".part")
    # No time of day in the header: the same content gives the same bytes.
    part.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    os.replace(part, path)


def rank_paths(path: Path, ranks: list[int]) -> dict[int, Path]:
    """The file itself, or one for each of several ranks: trace-rank-00008.json.gz"""
    stem, dot, suffix = path.name.partition(".")
    if len(ranks) == 1:
        return {ranks[0]: path}
    return {rank: path.with_name(f"{stem}-rank-{rank:05d}{dot}{suffix}") for rank in ranks}
