"""Tells the user what is not done under emulation: each thing once, and what all ranks skip only from rank 0."""

from __future__ import annotations

import os

import torch.distributed as dist

from maya_core.messages import say


class Skipped:
    """What was reported in this process."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, what: str, where: object = None, all_ranks: bool = True) -> None:
        """Prints `what` once, with the path if `where` is one. If all ranks skip it, only rank 0 prints it."""
        silent = all_ranks and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
        if what not in self._reported and not silent:
            say(f"under emulation {what}" + (f": {where}" if isinstance(where, str | os.PathLike) else ""))
        self._reported.add(what)
