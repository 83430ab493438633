"""Skips checkpoints under emulation. Weights are not computed, so a checkpoint would fill the disk with constants and might replace
a real one. What a program does on the device to collect its state still runs and is counted; only writing is skipped, with one
message.

torch.distributed.checkpoint writes and reads nothing. torch.save writes an object unless it contains a tensor of the emulated
device, or a host copy of one whose values are not known; it can always write to memory. The same holds for safetensors.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import torch

from maya_core.errors import MayaError
from maya_core.patches import Patches
from maya_core.recording.skipped import Skipped
from maya_core.torch_seam import training as seam
from maya_core.torch_seam.tensors import untyped


def install(native: ModuleType, patches: Patches, skipped: Skipped) -> Checkpoints:
    checkpoints = Checkpoints(native, skipped)
    for name in ("save", "load"):
        emulated = getattr(checkpoints, name)(getattr(torch, name))
        patches.set(torch, name, emulated)
        patches.set(torch.serialization, name, emulated)
    _no_saving(checkpoints, patches)
    _no_loading(checkpoints, patches)
    _no_staging(patches)
    patches.when_imported("safetensors.torch", functools.partial(_no_safetensors, checkpoints, patches))
    return checkpoints


class Checkpoints:
    """Skips checkpoints, and remembers which ones were skipped in this process."""

    def __init__(self, native: ModuleType, skipped: Skipped) -> None:
        self.native = native
        self.skipped = skipped
        self._unwritten: set[str] = set()  # paths

    def save(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, io.BytesIO) or not self.holds_emulated(obj):
                return original(obj, f, *args, **kwargs)
            where = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
            self.skip("torch.save writes no weights", where)

        return save

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, (str, os.PathLike)) and not os.path.exists(f) and os.path.abspath(f) in self._unwritten:
                raise MayaError(
                    f"torch.load: {os.fspath(f)} does not exist, because weights are not written under emulation.",
                    "Let the program continue without the file, or stop it earlier: maya run --steps N.",
                )
            return original(f, *args, **kwargs)

        return load

    def skip(self, what: str, where: Any, all_ranks: bool = False) -> None:
        self.skipped.report(what, where, all_ranks)
        if isinstance(where, (str, os.PathLike)):
            self._unwritten.add(os.path.abspath(where))

    def holds_emulated(self, obj: object) -> bool:
        finder = _Finder(self.is_emulated)
        try:
            finder.dump(obj)
        except Exception:  # torch.save itself reports what cannot be pickled
            return finder.found
        return finder.found

    def is_emulated(self, storage: torch.UntypedStorage) -> bool:
        if storage.device.type != "cpu":
            return bool(storage.is_cuda)
        return bool(self.native.is_made_up(storage))


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


class _Finder(pickle.Pickler):
    """Traverses an object as torch.save would, and stops at the first storage that meets a condition."""

    def __init__(self, condition: Callable[[torch.UntypedStorage], bool]) -> None:
        super().__init__(_Nowhere(), protocol=2)
        self.condition = condition
        self.found = False

    def persistent_id(self, obj: object) -> str | None:
        if not isinstance(obj, (torch.storage.TypedStorage, torch.UntypedStorage)):
            return None
        if self.condition(untyped(obj)):
            self.found = True
            raise StopIteration
        return "storage"


def _no_saving(checkpoints: Checkpoints, patches: Patches) -> None:
    def report(where: object) -> Any:
        from torch.distributed.checkpoint import Metadata

        checkpoints.skipped.report("torch.distributed.checkpoint writes nothing", where, True)
        return Metadata(state_dict_metadata={})

    def save(state_dict: Any, storage_writer: Any, *args: Any, **kwargs: Any) -> Any:
        return report(getattr(storage_writer, "checkpoint_id", None))

    class Executor:
        def execute_save(self, state_dict: Any, **kwargs: Any) -> Future[Any]:
            writer = kwargs.get("storage_writer")
            return _done(report(kwargs.get("checkpoint_id") or getattr(writer, "checkpoint_id", None)))

    seam.SAVE_STATE_DICT.replace(patches, save)
    for executor in seam.ASYNC_EXECUTORS:
        executor.replace(patches, Executor)


def _no_loading(checkpoints: Checkpoints, patches: Patches) -> None:
    def load(state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any) -> None:
        checkpoints.skipped.report(
            "torch.distributed.checkpoint reads nothing, tensors stay as they are",
            getattr(storage_reader, "checkpoint_id", None),
            True,
        )

    seam.LOAD_STATE_DICT.replace(patches, load)


def _no_staging(patches: Patches) -> None:
    """Skips the copy on the host that async_save makes first."""

    def stage(self: Any, state_dict: Any, **kwargs: Any) -> Any:
        return _done(state_dict) if seam.stages_in_background(self) else state_dict

    seam.STAGE.replace(patches, stage)
    seam.STAGE_BLOCKING.replace(patches, lambda self, state_dict: state_dict)


def _no_safetensors(checkpoints: Checkpoints, patches: Patches, safetensors: ModuleType) -> None:
    original = safetensors.save_file

    @functools.wraps(original)
    def save_file(tensors: dict[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any) -> None:
        if not any(checkpoints.is_emulated(tensor.untyped_storage()) for tensor in tensors.values()):
            original(tensors, filename, *args, **kwargs)
            return
        checkpoints.skip("safetensors writes no weights", filename)

    patches.set(safetensors, "save_file", save_file)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
