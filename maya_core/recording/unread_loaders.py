"""Finds data loaders that the program has made and not read by the time it is stopped, and whose batches are larger than those that it read.

They are usually for validation, which a program runs after an epoch. A smaller batch without gradients needs less memory than training.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from maya_core.patches import Patches

MOST = 3  # loaders that are told


class UnreadLoaders:
    def __init__(self, tell: Callable[[str], None], is_library: Callable[[str], bool]) -> None:
        """`tell` is called with what the user should know; `is_library` tells of a file whether it is no part of the program."""
        self._tell = tell
        self._is_library = is_library
        self.restart()

    def restart(self) -> None:
        self._made: list[tuple[weakref.ref[DataLoader[Any]], str]] = []  # with the line of the program
        self._read: set[int] = set()  # ids of data sets: frameworks make a new loader of the same data
        self._largest = 0  # batch that was read

    def install(self, patches: Patches) -> None:
        patches.set(DataLoader, "__init__", self._noting_made(DataLoader.__init__))
        patches.set(DataLoader, "__iter__", self._noting_read(DataLoader.__iter__))

    def _noting_made(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            self._made.append((weakref.ref(loader), self._line_of_data(loader) or self._line()))

        return __init__

    def _noting_read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __iter__(loader: DataLoader[Any]) -> Any:
            self._read.add(id(loader.dataset))
            self._largest = max(self._largest, _batch_size(loader))
            return original(loader)

        return __iter__

    def report(self) -> None:
        """The program will be stopped here. Loaders that it can still reach may be read later."""
        found: dict[int, tuple[str, int]] = {}  # by data set: the first loader of it is the program's own
        for reference, line in self._made:
            loader = reference()
            if loader is not None and id(loader.dataset) not in self._read and _batch_size(loader) > self._largest > 0:
                found.setdefault(id(loader.dataset), (line, _batch_size(loader)))
        for line, size in list(found.values())[:MOST]:
            self._tell(
                f"The data loader made at {line} was not read in the recorded steps. Its batches of {size:,} are larger than those that were read "
                f"({self._largest:,}), so if the program validates with it, it may need more memory than predicted. --steps all runs the program to its end."
            )

    def _line_of_data(self, loader: DataLoader[Any]) -> str:
        """The line at which the program made the first loader of the same data: accelerate makes another one from it."""
        alive = ((made(), line) for made, line in self._made)
        return next((line for one, line in alive if one is not None and one.dataset is loader.dataset), "")

    def _line(self) -> str:
        """The line of the program that makes a loader, perhaps through a library."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and (
            self._is_library(frame.f_code.co_filename) or "site-packages" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "an unknown line"


def _batch_size(loader: DataLoader[Any]) -> int:
    """0 if a sampler of the program's own decides it."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else 0
