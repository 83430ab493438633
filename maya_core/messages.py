"""Messages to the user while a program is emulated. They go to stderr: stdout belongs to the program."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Prints one line for the user."""
    print(f"maya: {message}", file=sys.stderr, flush=True)
