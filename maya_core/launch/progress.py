"""Progress of an emulation, shown on terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def show_progress(limit: int | None) -> Callable[[int], None] | None:
    """For a process that is emulated alone: a callback for each finished step, or None if there is no terminal."""
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


class JobProgress:
    """For the ranks of a job: a bar over the steps of all ranks that have started so far."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._done: dict[int, int] = {}
        self._bar: Progress | None = None

    def __enter__(self) -> JobProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, rank: int, step: int) -> None:
        """That rank has finished this many steps; 0 when it begins."""
        self._done[rank] = step
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            columns = (TextColumn("maya: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("steps of all ranks", total=None)
            self._bar.start()
        total = self._steps * len(self._done) if self._steps else None
        self._bar.update(self._bar.task_ids[0], completed=sum(self._done.values()), total=total)
