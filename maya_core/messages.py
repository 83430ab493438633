"""Messages to the user while a program is emulated. They go to stderr: stdout belongs to the program."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Prints one line for the user."""
    print(f"maya: {message}", file=sys.stderr, flush=True)


class Notes:
    """Sentences about an emulation that the user reads at once, and again in the prediction."""

    def __init__(self, quiet: bool = False) -> None:
        """`quiet`: another rank tells the user the same."""
        self.sentences: list[str] = []
        self._quiet = quiet

    def add(self, sentence: str) -> None:
        if sentence in self.sentences:
            return
        self.sentences.append(sentence)
        if not self._quiet:
            say(sentence)
