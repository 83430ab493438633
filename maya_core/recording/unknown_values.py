"""Notes every read of a value that nobody knows and that decides what the program does: a size, a branch, a loop.

What depends on weights is not computed, so a program that reads such a value gets a made-up one. That is told in the prediction, with
the line of the program and what was taken. With `--assume FILE:LINE=VALUE` the user says what the value really is; to find bounds of memory,
the launcher runs the program twice more, once with every unknown mask keeping nothing and once with all of them keeping everything
(`ProcessSettings.unknown`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from maya_core.errors import MayaError
from maya_core.ops.rules import Reading, UnknownSizes
from maya_core.patches import Patches
from maya_core.recording.steps import StepCounter
from maya_core.recording.value_uses import Place, ValueUse, ValueUses, uses_of
from maya_core.trace.unknown_read import Extreme, UnknownRead
from maya_core.version import PACKAGE

_TORCH = tuple(f"{folder}/" for folder in torch.__path__)
_MAYA = f"{PACKAGE}/"
# Parts of torch that decide something themselves. Other parts read values to print them or to check them.
_DECIDES = tuple(f"{folder}/{part}" for folder in torch.__path__ for part in ("optim/", "distributions/", "nn/utils/"))
_PRINTS = tuple(f"{folder}/_tensor_str.py" for folder in torch.__path__)


class _Reader(NamedTuple):
    """Who reads a value."""

    source: str  # the program's line
    library: (
        str  # the line of a library that the program called, and that reads the value; empty if the program itself does
    )
    frames: tuple[Place, ...]  # of the reader and its callers
    prints: bool  # the tensor is only printed


@dataclass
class _Count:
    """Reads at one place, for one purpose."""

    reads: int = 0
    kept: int = 0
    elements: int = 0
    number: float | None = None
    step: int = 0
    in_step: int = 0
    most_in_step: int = 0
    leaves_loop: bool = False
    assumed: bool = False
    routed: bool = False

    def read(self, step: int) -> None:
        self.reads += 1
        self.in_step = self.in_step + 1 if step == self.step else 1
        self.step = step
        self.most_in_step = max(self.most_in_step, self.in_step)


class UnknownValues(UnknownSizes):
    """What is taken for unknown values, and where they were read."""

    def __init__(
        self,
        native: ModuleType,
        steps: StepCounter,
        is_library: Callable[[str], bool],
        assume: Mapping[str, float],
        extreme: Extreme | None = None,
    ) -> None:
        """`is_library` tells of a file whether it is no part of the program; installed packages are none either."""
        self._native = native
        self._steps = steps
        self._is_library = is_library
        self.restart(assume, extreme)

    def restart(self, assume: Mapping[str, float], extreme: Extreme | None) -> None:
        self._assume = dict(assume)
        self._unused = set(assume)
        self._extreme = extreme
        self._counts: dict[tuple[str, str, str, str, str], _Count] = {}
        self._read: dict[int, None] = {}  # addresses of masks that forward has read; backward reads them again
        self.share = {"all": 1.0, "none": 0.0}[extreme] if extreme is not None else UnknownSizes.share
        self._native.set_extreme(None if extreme is None else extreme == "all")

    def install(self, patches: Patches) -> None:
        self._native.set_on_unknown(self._on_item)
        patches.on_undo(lambda: self._native.set_on_unknown(None))
        patches.on_undo(lambda: self._native.set_extreme(None))

    # ---- reads ----
    def told(self, how: str, tensor: torch.Tensor, found: Reading | None) -> Reading | None:
        sample = found.value if found is not None else None
        reader = self._reader()
        if reader.prints or (not reader.frames and tensor.data_ptr() in self._read):
            return None
        if not reader.frames:  # autograd's own thread, which works for the main one
            reader = self._reader(sys._current_frames().get(threading.main_thread().ident or 0))
        self._read[tensor.data_ptr()] = None
        while len(self._read) > _MOST_MASKS:
            self._read.pop(next(iter(self._read)))
        value = self._assumed(reader) if sample is not None else None  # no mask of such a size can be made
        share = value if value is not None else self.share if self._extreme is not None else None
        taken = _made(how, tensor, share) if share is not None and sample is not None else sample
        count = self._count(reader, how, "size", "")
        count.assumed = value is not None
        count.routed = found is not None and found.routed
        count.elements += tensor.numel()
        count.kept += _kept(how, taken, self.share * tensor.numel())
        if share is None or taken is None:
            return None
        return Reading(
            taken, made_up=value is None
        )  # what the user says counts as known, and so does what follows from it

    def _on_item(self, how: str, tensor: torch.Tensor, sample: torch.Tensor) -> bool | float | None:
        """Called when the host reads numbers: `item` for one of them, `copy` for whole tensors."""
        how, _, routed = how.partition(" ")
        if how == "copy" and tensor.numel() > _MOST_NUMBERS:
            return None
        reader = self._reader()
        if reader.prints or not reader.frames:
            return None
        uses = uses_of(reader.frames)
        value = self._assumed(reader) if how == "item" else None
        truth = tensor.dtype == torch.bool and how == "item"
        if value is None and truth and uses.healthy is not None:
            return uses.healthy
        use = uses.steers or (ValueUse("branch", "", 0) if truth and not uses.known else None)
        if use is not None and not (use.kind == "size" and tensor.is_floating_point()):
            count = self._count(reader, "scalar", use.kind, f"{use.file}:{use.line}" if use.file else "")
            count.leaves_loop = use.leaves_loop
            count.routed = bool(routed)
            count.assumed = value is not None
            if use.leaves_loop and value is None and count.in_step > _MOST_ROUNDS:
                value = self._ended_loop(reader, uses, truth, count.in_step)
            if how == "item":
                count.number = float(sample) if value is None and not sample.is_complex() else value
        return bool(value) if truth and value is not None else value

    @staticmethod
    def _ended_loop(reader: _Reader, uses: ValueUses, truth: bool, rounds: int) -> float | None:
        """A loop that a made-up value never ends is ended; if that cannot be done, the program is."""
        if truth and uses.ending is not None:
            return float(uses.ending)
        if rounds > _HOPELESS_ROUNDS:
            place = reader.library or reader.source
            raise MayaError(
                f"{place}: the loop has run {rounds:,} times in one step and ends only if a value is read that nobody knows.",
                f"Say what the value is: --assume {place}=NUMBER",
            )
        return None

    def _count(self, reader: _Reader, how: str, use: str, decides: str) -> _Count:
        decides = "" if decides in (reader.source, reader.library) else decides
        count = self._counts.setdefault((reader.source, reader.library, how, use, decides), _Count())
        count.read(self._steps.under_way)
        return count

    # ---- what the user says ----
    def _assumed(self, reader: _Reader) -> float | None:
        for place, value in self._assume.items():
            if any(_is_at(where, place) for where in (reader.source, reader.library)):
                self._unused.discard(place)
                return value
        return None

    # ---- who reads ----
    def _reader(self, frame: FrameType | None = None) -> _Reader:
        """Of the present thread, or of another one's frame."""
        frame = frame or sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_MAYA):
            frame = frame.f_back
        prints = False
        while frame is not None and _is_plumbing(frame.f_code.co_filename):
            prints = prints or frame.f_code.co_filename.startswith(_PRINTS)
            frame = frame.f_back
        frames: list[Place] = []
        reader, program = frame, None
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_MAYA) or file.startswith("<frozen"):
                frame = frame.f_back
                continue
            frames.append((frame.f_code, frame.f_lasti))
            if program is None and not (self._is_library(file) or "-packages/" in file):
                program = frame
            if program is not None and len(frames) >= _MOST_FRAMES:
                break
            frame = frame.f_back
        own = program is None or program is reader
        return _Reader(_line(program or reader), "" if own else _line(reader), tuple(frames[:_MOST_FRAMES]), prints)

    # ---- what the trace says ----
    def found(self) -> list[dict[str, Any]]:
        """Reads that decided something, for the trace. A loop that trains, and that a value only ends, does the same work in each step."""
        return [
            UnknownRead(
                source=source,
                library=library,
                how=how,  # type: ignore[arg-type]
                use=use,  # type: ignore[arg-type]
                decides=decides,
                reads=count.reads,
                kept=count.kept,
                elements=count.elements,
                number=count.number,
                assumed=count.assumed,
                routed=count.routed,
            ).model_dump()
            for (source, library, how, use, decides), count in self._counts.items()
            if not count.leaves_loop or count.most_in_step > 1
        ]

    def unused(self) -> list[str]:
        """Places that the user named and where nothing unknown was read."""
        return sorted(self._unused)


_MOST_NUMBERS = 1 << 16  # of a tensor that is copied to the host; larger ones are data, not sizes
_MOST_FRAMES = 8
_MOST_ROUNDS, _HOPELESS_ROUNDS = 1000, 10_000  # of a loop, in one step
_MOST_MASKS = 4096  # whose addresses are kept


def _is_plumbing(file: str) -> bool:
    return file.startswith((_MAYA, *_TORCH)) and not file.startswith(_DECIDES)


def _line(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _is_at(source: str, place: str) -> bool:
    """Whether `place` names this line: by the whole path, or by its last parts."""
    return source == place or source.endswith(os.sep + place.removeprefix("./"))


def _made(how: str, tensor: torch.Tensor, value: float) -> torch.Tensor | None:
    """A value on the host with the wanted outcome: a share that is kept or distinct, the largest number, or the mean of repeats."""
    numel = tensor.numel()
    with torch.no_grad():
        if how in ("mask", "distinct"):
            share = min(1.0, max(0.0, value))
            places = torch.arange(numel)
            if how == "mask":  # evenly spread
                flat = ((places + 1) * share).floor() > (places * share).floor()
            else:
                flat = places % max(1, round(share * numel))
            return flat.to(tensor.dtype).view(tensor.shape)
        if how == "sum":
            ends = (torch.arange(numel + 1, dtype=torch.float64) * value).round()
            return ends.diff().to(tensor.dtype).view(tensor.shape)
        return torch.full(tensor.shape, int(value), dtype=tensor.dtype)


def _kept(how: str, taken: torch.Tensor | None, without: float) -> int:
    """What a value keeps: elements of a mask, distinct elements, repeats, or the largest number."""
    if taken is None:
        return int(without)
    if how == "mask":
        return int(taken.count_nonzero())
    if how == "distinct":
        return int(torch.unique(taken).numel())
    return int(taken.sum() if how == "sum" else taken.max()) if taken.numel() else 0
