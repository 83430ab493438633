"""Writes a rank's memory as torch.cuda.memory._dump_snapshot would have saved it, for https://pytorch.org/memory_viz.

    write_snapshot(trace, Path("memory.pickle"))

The viewer only accepts pickles. This one contains dicts, lists, tuples, numbers and strings, in a protocol that the viewer reads.
Maya itself reads no pickles.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.errors import MayaError
from maya_core.files import FileKind, write_file
from maya_core.trace.memory_peaks import CATEGORIES, allocated, blocks, devices_used, reserved
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind, Phase

PROTOCOL = 4  # the newest one that the viewer supports
SMALL = 2 * 2**20  # the size of segments for small blocks (kSmallBuffer)
POOL = (0, 0)  # the default pool


def write_snapshot(trace: RankTrace, path: str | Path, device: int | None = None) -> Path:
    """Writes the history and the final memory of one of the rank's GPUs; by default of the one with the highest peak."""
    path = Path(path)
    write_file(path, pickle.dumps(snapshot(trace, device), protocol=PROTOCOL), FileKind.SNAPSHOT)
    return path


def snapshot(trace: RankTrace, device: int | None = None) -> dict[str, Any]:
    if device is None:
        peaks = {each: int(allocated(trace, each).max()) for each in devices_used(trace)}
        device = max(peaks, key=lambda each: peaks[each], default=0)
    if device not in devices_used(trace):
        used = ", ".join(map(str, devices_used(trace))) or "none"
        raise MayaError(
            f"rank {trace.meta['rank']} allocates nothing on GPU {device}.", f"Its GPUs with allocations: {used}."
        )
    frames = _Frames(trace)
    history = _history(trace, device, frames)
    # The index in the list is the number of the device.
    return {
        "generator": "Maya memory snapshot",  # ignored by the viewer
        "segments": _segments(trace, device, frames),
        "device_traces": [*([] for _ in range(device)), history],
        "annotations": [],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
            "expandable_segments": False, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }  # fmt: skip


class _Frames:
    """Call stacks of one frame: the line that allocated, and its module. Equal stacks share one object."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        self.known: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def of(self, event: np.void) -> list[dict[str, Any]]:
        key = int(event["subject"]), int(event["module"]), int(event["phase"])
        if key not in self.known:
            line, module, phase = key
            file, _, number = self.trace.lines[line].rpartition(":")
            name = self.trace.modules[module] or "outside any module"
            self.known[key] = [
                {
                    "filename": file or "??",
                    "line": int(number) if number.isdigit() else 0,
                    "name": f"{name} ({Phase(phase).name.lower()})",
                }
            ]
        return self.known[key]


def _history(trace: RankTrace, device: int, frames: _Frames) -> list[dict[str, Any]]:
    """Every action of the allocator, in order."""
    events = trace.events
    of_memory = (
        EventKind.ALLOC,
        EventKind.FREE,
        EventKind.SEGMENT_ALLOC,
        EventKind.SEGMENT_FREE,
        EventKind.OUT_OF_MEMORY,
    )
    places = np.flatnonzero((events["device"] == device) & np.isin(events["kind"], of_memory))
    every = blocks(trace, device)
    made = {int(place): number for number, place in enumerate(every.made)}
    owner = {int(place): number for number, place in enumerate(every.freed)}
    held = reserved(trace, device)
    room = trace.meta["gpu_memory_bytes"] - trace.meta["outside_allocator_bytes"]
    entries: list[dict[str, Any]] = []
    for place in places.tolist():
        event = events[place]
        stream = trace.streams[int(event["stream"])][1] if len(trace.streams) else 0
        at = {"stream": stream, "time_us": int(event["time_ns"]) // 1000, "compile_context": "N/A", "user_metadata": "", "pool_id": POOL}  # fmt: skip
        address, size = int(event["a"]), int(event["b"])
        kind = EventKind(int(event["kind"]))
        if kind == EventKind.ALLOC:
            category = CATEGORIES[every.category[made[place]]]
            entries.append({"action": "alloc", "addr": address, "size": size, "frames": frames.of(event), "category": category, **at})  # fmt: skip
        elif kind == EventKind.FREE:
            whose = owner.get(place)
            stack = frames.of(events[every.made[whose]]) if whose is not None else []
            for action in ("free_requested", "free_completed"):
                entries.append({"action": action, "addr": address, "size": size, "frames": stack, **at})
        elif kind == EventKind.OUT_OF_MEMORY:
            entries.append({"action": "oom", "device_free": max(0, room - int(held[place])), "size": address, "frames": [], **at})  # fmt: skip
        else:
            action = "segment_alloc" if kind == EventKind.SEGMENT_ALLOC else "segment_free"
            # Without it the viewer adds a category of this name itself, and fails.
            entries.append({"action": action, "addr": address, "size": size, "frames": [], "category": "unknown", **at})
    return entries


def _segments(trace: RankTrace, device: int, frames: _Frames) -> list[dict[str, Any]]:
    """What the allocator holds at the end: each segment, divided into blocks in use and free blocks."""
    events = trace.events
    live: dict[int, tuple[int, int]] = {}  # address: (bytes, stream)
    here = events["device"] == device
    for event in events[here & np.isin(events["kind"], (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE))]:
        if event["kind"] == EventKind.SEGMENT_ALLOC:
            live[int(event["a"])] = int(event["b"]), trace.streams[int(event["stream"])][1] if trace.streams else 0
        else:
            live.pop(int(event["a"]), None)
    every = blocks(trace, device)
    last = np.flatnonzero(every.freed == len(events))
    last = last[np.argsort(events["a"][every.made[last]], kind="stable")]
    addresses = events["a"][every.made[last]]
    found = []
    for address, (size, stream) in sorted(live.items()):
        inside = last[np.searchsorted(addresses, address) : np.searchsorted(addresses, address + size)]
        parts = _blocks(trace, [int(every.made[number]) for number in inside], address, size, frames)
        used = sum(part["size"] for part in parts if part["state"] == "active_allocated")
        found.append(
            {
                "device": device, "address": address, "total_size": size, "stream": stream,
                "segment_type": "small" if size <= SMALL else "large", "segment_pool_id": POOL, "is_expandable": False,
                "frames": [], "allocated_size": used, "active_size": used, "requested_size": used, "blocks": parts,
            }
        )  # fmt: skip
    return found


def _blocks(trace: RankTrace, made: list[int], start: int, size: int, frames: _Frames) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    at = start
    for place in made:
        event = trace.events[place]
        address, length = int(event["a"]), int(event["b"])
        if address > at:
            parts.append(_block(at, address - at, "inactive", []))
        parts.append(_block(address, length, "active_allocated", frames.of(event)))
        at = address + length
    if at < start + size:
        parts.append(_block(at, start + size - at, "inactive", []))
    return parts


def _block(address: int, size: int, state: str, stack: list[dict[str, Any]]) -> dict[str, Any]:
    # A trace contains sizes as the allocator rounds them. The requested size may be up to 511 bytes smaller.
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": stack}
