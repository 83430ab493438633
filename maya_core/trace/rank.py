"""One rank's trace, and its file: a zip of numpy arrays and JSON without pickle, written completely or not at all.

docs/trace.md describes the format. Collating the ranks of a job is job.py's part.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.errors import MayaError
from maya_core.installation import installation
from maya_core.trace.call import DEFAULT_SETTINGS, Call, Tensor, TorchSettings, packed
from maya_core.trace.communication import CollectiveCall, Communicator, Frame, Site
from maya_core.trace.schema import EVENT, VERSION, EventKind
from maya_core.trace.triton_kernel import TritonKernel


@dataclass(frozen=True)
class RankTrace:
    """The calls that a rank made to its GPUs, in order."""

    meta: dict[str, Any]
    events: np.ndarray  # of dtype EVENT
    calls: list[Call]  # distinct calls of ops, by number
    modules: list[str]  # module path by number
    streams: list[tuple[int, int]]  # (device, stream id) by number; stream id 0 is the default stream
    communicators: list[Communicator]
    collectives: list[CollectiveCall]  # on the communicators, by number
    sites: list[Site]  # call stacks, by number
    lines: list[str] = field(default_factory=lambda: [""])  # file:line that allocated memory, by number; 0 is none

    @property
    def ops(self) -> np.ndarray:
        answer: np.ndarray = self.events[self.events["kind"] == EventKind.OP]
        return answer

    @property
    def steps(self) -> int:
        return int(np.count_nonzero(self.events["kind"] == EventKind.STEP_END))

    def step(self, number: int) -> np.ndarray:
        """The events of step `number` (from 1), up to and including its end."""
        ends = np.flatnonzero(self.events["kind"] == EventKind.STEP_END)
        if not 1 <= number <= len(ends):
            raise IndexError(f"step {number} is not in the trace, which has {len(ends)}")
        first = 0 if number == 1 else int(ends[number - 2]) + 1
        return self.events[first : int(ends[number - 1]) + 1]


def _to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        packed: dict[str, Any] = {"d": value.dtype, "s": list(value.sizes)}
        if not value.is_contiguous:
            packed["t"] = list(value.strides)
        if value.device == "cpu":
            packed["on"] = "cpu"
        return packed
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        sizes = tuple(value["s"])
        strides = tuple(value["t"]) if "t" in value else packed(sizes)
        return Tensor(value["d"], sizes, strides, value.get("on", "cuda"))
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return value


def _call_to_json(call: Call) -> dict[str, Any]:
    row = {"op": call.op, "names": call.names, "args": _to_json(call.arguments), "out": _to_json(call.outputs)}
    if settings := call.settings.as_json():
        row["settings"] = settings
    if call.triton is not None:
        row["triton"] = call.triton.as_json()
    if call.kernels:
        row |= {"kernels": call.kernels, "flops": call.flops}
    return row


def _call_from_json(row: dict[str, Any]) -> Call:
    return Call(
        row["op"],
        row["names"],
        _from_json(row["args"]),
        _from_json(row["out"]),
        TorchSettings(**row["settings"]) if "settings" in row else DEFAULT_SETTINGS,
        TritonKernel.from_json(row["triton"]) if "triton" in row else None,
        row.get("kernels", []),
        row["flops"] if "kernels" in row else 0,
    )


# Numbers that mostly grow in small steps compress well as differences.
_AS_DIFFERENCES = ("time_ns", "a")


def _communication_to_json(trace: RankTrace) -> dict[str, Any]:
    frames = list(dict.fromkeys(frame for site in trace.sites for frame in site))
    numbers = {frame: number for number, frame in enumerate(frames)}
    return {
        "communicators": [asdict(communicator) for communicator in trace.communicators],
        "calls": [asdict(call) for call in trace.collectives],
        "frames": [[frame.file, frame.line, frame.function] for frame in frames],
        "sites": [[numbers[frame] for frame in site] for site in trace.sites],
    }


def _communication_from_json(rows: dict[str, Any]) -> tuple[list[Communicator], list[CollectiveCall], list[Site]]:
    frames = [Frame(*row) for row in rows["frames"]]
    return (
        [Communicator(**{**row, "ranks": tuple(row["ranks"])}) for row in rows["communicators"]],
        [
            CollectiveCall(**{**row, "splits_in": tuple(row["splits_in"]), "splits_out": tuple(row["splits_out"])})
            for row in rows["calls"]
        ],
        [tuple(frames[number] for number in site) for site in rows["sites"]],
    )


def write_trace(path: Path, trace: RankTrace) -> None:
    """Writes the trace. An existing file is replaced only once the new one is complete."""
    part = path.with_name(path.name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        archive.writestr("meta.json", json.dumps({**trace.meta, "format": "maya-rank-trace", "version": VERSION}))
        for column in EVENT.names or ():
            values = np.ascontiguousarray(trace.events[column])
            if column in _AS_DIFFERENCES:
                values = np.diff(values, prepend=values.dtype.type(0))
            buffer = io.BytesIO()
            np.save(buffer, values, allow_pickle=False)
            archive.writestr(f"events/{column}.npy", buffer.getvalue())
        archive.writestr("calls.json", json.dumps([_call_to_json(call) for call in trace.calls], separators=(",", ":")))
        archive.writestr("modules.json", json.dumps(trace.modules))
        archive.writestr("streams.json", json.dumps(trace.streams))
        archive.writestr("lines.json", json.dumps(trace.lines))
        archive.writestr("communication.json", json.dumps(_communication_to_json(trace), separators=(",", ":")))
    os.replace(part, path)


def read_trace(path: str | Path) -> RankTrace:
    """Reads a trace file; raises a MayaError that says what is wrong with it."""
    path = Path(path)
    if not path.exists():
        raise MayaError(f"no trace at {path}.", "`maya run` writes one for each rank into its --out folder.")
    try:
        with zipfile.ZipFile(path) as archive:
            meta = json.loads(archive.read("meta.json"))
            _check_version(path, meta)
            if meta["version"] < 6:
                meta["without_settings"] = True  # kept when the trace is written again
            first = np.load(io.BytesIO(archive.read("events/kind.npy")), allow_pickle=False)
            events = np.zeros(len(first), EVENT)
            for column in EVENT.names or ():
                values = np.load(io.BytesIO(archive.read(f"events/{column}.npy")), allow_pickle=False)
                events[column] = np.cumsum(values) if column in _AS_DIFFERENCES else values
            # Up to version 5, calls were called signatures and contained the launches of the recording GPU.
            rows = json.loads(archive.read("calls.json" if meta["version"] >= 6 else "signatures.json"))
            calls = [_call_from_json(row) for row in rows]
            modules = json.loads(archive.read("modules.json"))
            streams = [(device, stream) for device, stream in json.loads(archive.read("streams.json"))]
            communication: tuple[list[Communicator], list[CollectiveCall], list[Site]] = ([], [], [])
            if meta["version"] >= 2:
                communication = _communication_from_json(json.loads(archive.read("communication.json")))
            lines = json.loads(archive.read("lines.json")) if meta["version"] >= 3 else [""]
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, OSError) as error:
        raise MayaError(
            f"{path} is not a whole Maya trace ({error}).",
            "It may be truncated, or another kind of file; run `maya run` again to record it.",
        ) from error
    return RankTrace(meta, events, calls, modules, streams, *communication, lines)


def _check_version(path: Path, meta: dict[str, Any]) -> None:
    if meta.get("format") != "maya-rank-trace":
        raise ValueError("not a rank trace")
    if meta["version"] > VERSION:
        raise MayaError(
            f"{path} was written by a newer Maya (trace version {meta['version']}, this one reads up to {VERSION}).",
            installation().upgrade_advice(),
        )
