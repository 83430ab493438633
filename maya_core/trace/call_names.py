"""Describes communication in words for the terminal: calls, communicators, ranks and call stacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from maya_core.hardware.dtypes import item_bytes
from maya_core.trace.communication import CollectiveCall, Communicator, Frame, Site

FRAMES_SHOWN = 6

_DIRECTION = {"broadcast": "from", "scatter": "from", "recv": "from", "reduce": "to", "gather": "to", "send": "to"}


def call_in_words(call: CollectiveCall, group: Communicator) -> str:
    """A call with its peer and size: all_reduce (sum) of 4,096 Float (16.0 KiB)."""
    if call.op == "barrier":
        return call.op
    reduction = f" ({call.reduction})" if call.reduction else ""
    peer = f" {_DIRECTION[call.op]} rank {group.ranks[call.peer]}" if call.peer >= 0 else ""
    count = elements(call)
    return f"{call.op}{reduction}{peer} of {count:,} {call.dtype} ({_bytes(count * item_bytes(call.dtype))})"


def elements(call: CollectiveCall) -> int:
    """The number of elements by which a call is described: what a rank sends, or what it receives where only one rank sends."""
    return call.elements_out if call.op in ("scatter", "recv") else call.elements_in


def communicator_in_words(group: Communicator) -> str:
    count = len(group.ranks)
    return f"{group.backend} communicator {group.name} ({count} rank{'s' * (count != 1)}: {abbreviated(group.ranks)})"


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {abbreviated(ranks)}"


def abbreviated(ranks: Sequence[int]) -> str:
    """Ranges of ranks: 0-2, 4-7; or 0, 8, 16, … where that would be long."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], "…"])


def frames_of_interest(site: Site) -> tuple[Frame, ...]:
    """The most helpful frames: the program's own, otherwise its libraries', otherwise torch's."""
    for hidden in ({"site-packages", "dist-packages", "torch", "maya_core"}, {"torch", "maya_core"}, set[str]()):
        frames = [frame for frame in site if not hidden & set(PurePath(frame.file).parts)]
        if frames:
            return tuple(frames[-FRAMES_SHOWN:])
    return ()


def _bytes(count: float) -> str:
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.2f} GiB"


def generic(module: str) -> str:
    """A module's path with `*` for the numbers of repeated layers: GPT.blocks.*.mlp"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
