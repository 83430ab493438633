"""Ends a command cleanly when it receives SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM  # the exit code of such a command


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """SIGTERM unwinds a command as Ctrl-C does: it prints what it has found, and leaves no process or private folder behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the cleanup
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
