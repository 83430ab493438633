"""Marks what a framework does for evaluation under emulation: one or two batches of each evaluation loop, once, after the last recorded step.

At that place nothing of the evaluation can change the training that was recorded, and everything that takes memory in a real evaluation is
there: weights, the optimizer's state, the allocator's cache. The framework's integration runs the loops; this module keeps where they begin and
end, and decides what an error in them means.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from maya_core.trace.schema import EVENT, EvaluationMark, EventKind, Phase

MOST_CHARACTERS = 200  # of an error's message


@dataclass(frozen=True)
class EvaluationLoop:
    """An evaluation loop as it is in the real training."""

    name: str
    batches: int | None  # None: the loader has no length
    every_steps: float | None  # None: it is not known how often the loop runs


class EvaluationRun:
    """Loops that run one after the other. The first begins at once, and each of the others with its first batch."""

    def __init__(self, record: Evaluations, first: int) -> None:
        self._record = record
        self._first = self._loop = first
        self._record.mark(self._loop, EvaluationMark.BEGIN)

    @contextmanager
    def batch(self, loop: int = 0) -> Iterator[None]:
        """Around a batch of the run's loop of that number."""
        while self._loop < self._first + loop:
            self.end()
            self._loop += 1
            self._record.mark(self._loop, EvaluationMark.BEGIN)
        self._record.mark(self._loop, EvaluationMark.BATCH_BEGIN)
        yield
        self._record.mark(self._loop, EvaluationMark.BATCH_END)

    def end(self) -> None:
        self._record.mark(self._loop, EvaluationMark.END)


class Evaluations:
    """The evaluation loops of a program, and the places in the record that they occupy."""

    def __init__(
        self, native: ModuleType, tell: Callable[[str], None], is_library: Callable[[str], bool] = lambda _: False
    ) -> None:
        """`tell` is called with what the user should know; `is_library` tells of a file whether it is no part of the program."""
        self.native = native
        self._tell = tell
        self._is_library = is_library
        self.restart()

    def restart(self) -> None:
        self.loops: list[EvaluationLoop] = []
        self.out_of_memory = False  # an evaluation ended the program
        self._marks: list[tuple[int, int, EvaluationMark]] = []  # events recorded before, loop, what

    @property
    def under_way(self) -> bool:
        return bool(self._marks) and self._marks[-1][2] != EvaluationMark.END

    def mark(self, loop: int, what: EvaluationMark) -> None:
        self._marks.append((self.native.event_count(), loop, what))

    @contextmanager
    def emulated(self, loops: Sequence[EvaluationLoop]) -> Iterator[EvaluationRun]:
        """Around the work of these loops. Running out of memory ends the program, as it would on a GPU. Another error ends only the
        evaluation, because it may come from values that are not known under emulation."""
        run = EvaluationRun(self, len(self.loops))
        self.loops += loops
        try:
            with self.attempt():
                yield run
        finally:
            run.end()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around whatever only the evaluation needs, its data loaders for example."""
        try:
            yield
        except Exception as error:
            if _ran_out_of_memory(error):
                self.out_of_memory = True
                raise
            self.not_emulated(
                f"{self._in_words(error)}. If that is not due to made-up values, the job fails there, too"
            )

    def not_emulated(self, why: str) -> None:
        """Tells the user, once, that the prediction is without validation or a part of it."""
        self._tell(
            f"Validation was not emulated to its end: {why}. Its memory and its time may be missing in this prediction."
        )

    def _in_words(self, error: BaseException) -> str:
        message = " ".join(str(error).split())[:MOST_CHARACTERS].rstrip(".")
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if not self._is_library(one.filename) and "site-packages" not in one.filename]
        return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text

    # ---- the trace ----
    def found(self) -> list[dict[str, Any]]:
        """The loops, for the trace."""
        return [asdict(loop) for loop in self.loops]

    def marks(self) -> tuple[list[int], np.ndarray]:
        """The marks as events, and the number of recorded events before each."""
        events = np.zeros(len(self._marks), EVENT)
        events["kind"] = EventKind.EVALUATION
        events["phase"] = Phase.VALIDATION
        events["subject"] = [loop for _, loop, _ in self._marks]
        events["a"] = [what for _, _, what in self._marks]
        return [place for place, _, _ in self._marks], events

    def in_phase(self, record: np.ndarray) -> np.ndarray:
        """The record, in which the work of evaluation has a phase of its own."""
        if not self._marks:
            return record
        record = record.copy()
        begun = 0
        for place, _, what in self._marks:
            if what == EvaluationMark.BEGIN:
                begun = place
            elif what == EvaluationMark.END:
                record["phase"][begun:place] = Phase.VALIDATION
        return record


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is that of the allocator, or was raised because of it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
