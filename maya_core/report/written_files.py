"""What became of the files that a program wrote, in words."""

from __future__ import annotations

from pathlib import Path

from maya_core.overlay.files import Written
from maya_core.report import wording

MOST_NAMES = 3


def written_files(found: list[Written], kept: Path | None) -> str:
    largest = sorted(found, key=lambda each: -each.bytes)[:MOST_NAMES]
    names = ", ".join(f"{_short(each.path)} ({wording.size(each.bytes)})" for each in largest)
    what = f"{len(found):,} file{'s' * (len(found) != 1)}: {names}{', ...' if len(found) > MOST_NAMES else ''}"
    if kept is not None:
        return f"The program wrote {what}. Kept below {kept}; weights in them are made up."
    return f"The program wrote {what}. Nothing was changed there; --keep-files keeps what it wrote."


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
