"""The communication in a rank's trace: communicators, the calls on them, and the places in the program that make them."""

from __future__ import annotations

from dataclasses import dataclass

POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Communicator:
    """A group of ranks that communicate. Communicators of two ranks are the same if name, backend and ranks agree."""

    backend: str  # nccl or gloo
    name: str  # torch's group name
    ranks: tuple[int, ...]  # global ranks by their place in the group
    rank: int  # this rank's place


@dataclass(frozen=True)
class CollectiveCall:
    """A collective or message of one rank. `peer` is a place in the group (root, source or destination), or -1."""

    communicator: int  # index into the trace's communicators
    op: str  # all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor, all_to_all, gather, scatter, barrier, send, recv
    dtype: str  # as c10 names it: Float, BFloat16, Long
    elements_in: int  # sent by this rank
    elements_out: int  # received by this rank
    peer: int = -1
    reduction: str = ""
    splits_in: tuple[int, ...] = ()  # of an uneven exchange: elements for each rank
    splits_out: tuple[int, ...] = ()  # elements from each rank


@dataclass(frozen=True)
class Frame:
    """A line of Python in the call stack of a call."""

    file: str
    line: int
    function: str


Site = tuple[Frame, ...]  # outermost first
