"""Checkpoints under emulation. Weights are not computed, so their values are left out of what is written: a file has its true size, but no
blocks on the disk where values that nobody knows would stand. What a program does on the device to collect its state runs and is counted.

torch.save writes a file that torch.load reads, here and elsewhere; storages whose values are not known are holes in it, and a record names
them, so that their values count as unknown when they are read again. The same holds for safetensors, whose holes read as zeros. Where files go
is decided by the overlay (`maya_core/overlay`).

torch.distributed.checkpoint writes no more than the folder and a `.metadata` file, and reads nothing: tensors stay as they are.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from maya_core.overlay import files
from maya_core.patches import Patches
from maya_core.recording.skipped import Skipped
from maya_core.torch_seam import training as seam
from maya_core.torch_seam.tensors import untyped

HOLES = "maya_unknown_values"  # the record of a checkpoint that names storages without values


def install(native: ModuleType, patches: Patches, skipped: Skipped) -> Checkpoints:
    checkpoints = Checkpoints(native, skipped)
    seam.OPEN_WRITER.wrap(patches, functools.partial(_writing_holes, checkpoints))
    seam.OPEN_READER.wrap(patches, functools.partial(_reading_holes, checkpoints))
    for module in (torch, torch.serialization):
        patches.wrap(module, "load", _not_mapping_holes)
    _no_saving(checkpoints, patches)
    _no_loading(checkpoints, patches)
    _no_staging(patches)
    patches.when_imported("safetensors.torch", functools.partial(_sparse_safetensors, checkpoints, patches))
    for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
        patches.when_imported(name, functools.partial(_covered_safetensors, patches))
    return checkpoints


class Checkpoints:
    """Knows which values nobody knows, and tells what is not written."""

    def __init__(self, native: ModuleType, skipped: Skipped) -> None:
        self.native = native
        self.skipped = skipped

    def skip(self, what: str, where: Any, all_ranks: bool = False) -> None:
        self.skipped.report(what, where, all_ranks)

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


# ---- torch.save and torch.load ----


class _Writer:
    """torch's writer of a checkpoint, which leaves out the values of emulated storages."""

    def __init__(self, writer: Any, checkpoints: Checkpoints) -> None:
        self.writer = writer
        self.checkpoints = checkpoints
        self.holes: list[str] = []

    def write_record(self, name: str, data: Any, size: int) -> None:
        if not isinstance(data, torch.UntypedStorage) or not self.checkpoints.is_emulated(data):
            self.writer.write_record(name, data, size)
            return
        self.holes.append(name)
        self.writer.write_record_metadata(name, size)

    def write_end_of_file(self) -> None:
        if self.holes:
            names = json.dumps(self.holes)
            self.writer.write_record(HOLES, names, len(names))
        self.writer.write_end_of_file()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)


def _writing_holes(checkpoints: Checkpoints, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def open_writer(name_or_buffer: Any) -> Any:
        opened = original(name_or_buffer)
        opened.file_like = _Writer(opened.file_like, checkpoints)
        return opened

    return open_writer


class _Reader:
    """torch's reader of a checkpoint. Values that were left out are unknown again."""

    def __init__(self, reader: Any, checkpoints: Checkpoints) -> None:
        self.reader = reader
        self.checkpoints = checkpoints
        self.holes = frozenset(_holes_of(reader))

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> torch.Tensor:
        if name not in self.holes:
            found: torch.Tensor = self.reader.get_storage_from_record(name, size, kind)
            return found
        empty = torch.empty(size, dtype=torch.uint8)
        self.checkpoints.native.mark_made_up(empty.untyped_storage())
        return empty

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)


def _holes_of(reader: Any) -> list[str]:
    if not reader.has_record(HOLES):
        return []
    names: list[str] = json.loads(reader.get_record(HOLES))
    return names


def _reading_holes(checkpoints: Checkpoints, original: type) -> Callable[[Any], Any]:
    @functools.wraps(original, updated=())
    def open_reader(name_or_buffer: Any) -> Any:
        opened = original(name_or_buffer)
        opened.file_like = _Reader(opened.file_like, checkpoints)
        return opened

    return open_reader


def _not_mapping_holes(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load, which reads a file with holes instead of mapping it: what is mapped would count as known zeros."""

    @functools.wraps(original)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mmap") and isinstance(f, (str, os.PathLike)) and _has_holes(os.fspath(f)):
            kwargs["mmap"] = False
        return original(f, *args, **kwargs)

    return load


def _has_holes(path: str) -> bool:
    try:
        return bool(_holes_of(seam.reader_of(path)))
    except (OSError, RuntimeError):  # torch.load itself reports it
        return False


# ---- safetensors ----

# Names of dtypes in the format that do not follow from torch's.
DTYPES = {
    "bool": "BOOL", "bfloat16": "BF16", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip


def _sparse_safetensors(checkpoints: Checkpoints, patches: Patches, safetensors: ModuleType) -> None:
    original = safetensors.save_file

    @functools.wraps(original)
    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        emulated = {name for name, tensor in tensors.items() if checkpoints.is_emulated(tensor.untyped_storage())}
        if not emulated:
            original(tensors, filename, metadata)
            return
        _write_safetensors(tensors, emulated, filename, metadata)

    patches.set(safetensors, "save_file", save_file)
    for module in list(sys.modules.values()):  # that have imported it by name, such as transformers before a block
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                patches.set(module, name, save_file)


def _covered_safetensors(patches: Patches, module: ModuleType) -> None:
    """Lets safetensors write aside. It renames what it has written by a system call of its own, which the overlay does not see."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            aside = files.aside()
            if aside is None:
                original(tensors, filename, *args, **kwargs)
                return
            with tempfile.TemporaryDirectory(dir=aside) as folder:
                made = Path(folder, "tensors")
                original(tensors, made, *args, **kwargs)
                if os.path.lexists(filename):
                    os.remove(filename)
                shutil.move(made, filename)

        return serialize_file

    patches.wrap(module, "serialize_file", wrap)


def _write_safetensors(
    tensors: dict[str, torch.Tensor], emulated: set[str], filename: Any, metadata: dict[str, str] | None
) -> None:
    """A file in the format of safetensors: the length of a header, the header in JSON, and the values, with holes."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    host, end = {name: tensor.cpu() for name, tensor in tensors.items()}, 0  # copies that the program would make
    for name, tensor in host.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        letter = {"u": "U", "i": "I", "f": "F"}.get(kind[0], "")
        bits = "".join(filter(str.isdigit, kind))
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES.get(kind, letter + bits),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in host.items():
            if name in emulated:
                file.seek(tensor.nbytes, os.SEEK_CUR)
            else:
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        file.truncate()


# ---- torch.distributed.checkpoint ----


def _no_saving(checkpoints: Checkpoints, patches: Patches) -> None:
    def report(where: object) -> Any:
        from torch.distributed.checkpoint import Metadata

        checkpoints.skipped.report("torch.distributed.checkpoint writes no weights", where, True)
        metadata = Metadata(state_dict_metadata={})
        if isinstance(where, (str, os.PathLike)) and "://" not in str(where):
            Path(where).mkdir(parents=True, exist_ok=True)  # programs look whether it is there
            Path(where, ".metadata").write_bytes(pickle.dumps(metadata))
        return metadata

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


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
