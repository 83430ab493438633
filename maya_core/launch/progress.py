"""A line that says how far the emulated program is, on terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def show_progress(limit: int | None) -> Callable[[int], None] | None:
    """A callback for each step done, or None where nobody would see it."""
    if not sys.stderr.isatty():
        return None
    started = time.monotonic()

    def show(step: int) -> None:
        total = f"/{limit}" if limit else ""
        last = limit is not None and step >= limit
        sys.stderr.write(
            f"\rmaya: step {step}{total} emulated, {time.monotonic() - started:.1f} s" + ("\n" if last else "")
        )
        sys.stderr.flush()

    return show
