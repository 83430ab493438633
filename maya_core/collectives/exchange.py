"""Which ranks give one another true values, and which are taken to do as this one does.

Shapes are all that most collectives need, so a rank can be emulated alone. Where the program reads what came from
another rank, that rank is asked: the sender of host data (and of small integers on the device: sizes, seeds, pickled
objects) always; every rank of a small group whose program gathers or reduces objects or host data, which from then on
tell one another their integers on the device, too; and ranks the user chose to emulate.
A rank that is not emulated is taken to give what this one gives: it runs the same program in lockstep.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Protocol

import torch

from maya_core.collectives.buffers import Buffers
from maya_core.collectives.collective_record import CollectiveRecord
from maya_core.collectives.values import FROM_ONE, TO_MANY, Values, outcome, sources, split
from maya_core.errors import MayaError
from maya_core.trace.communication import POINT_TO_POINT, CollectiveCall, Communicator

# Groups up to this size have every rank emulated when they gather or reduce what the host reads: one node.
EXACT_GROUP = 8

# Larger tensors of numbers are not passed on, as native/values.h does not remember them.
MOST_FLOATS, MOST_INTEGERS = 2**16, 2**20

_thread = threading.local()


@contextmanager
def carrying_objects(native: ModuleType) -> Iterator[None]:
    """Collectives in this block carry pickled objects: the host reads them, though they travel by the device."""
    before = _carries_objects()
    _thread.objects = True
    native.carry_objects(True)
    try:
        yield
    finally:
        _thread.objects = before
        native.carry_objects(before)


def _called_by_program() -> bool:
    """Is it a call of torch.distributed's that is under way, and not one of DTensor's own, of a norm on the host, say?"""
    frame = sys._getframe(2)
    return frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"


def _carries_objects() -> bool:
    return getattr(_thread, "objects", False)


class Peers(Protocol):
    """The other emulated ranks."""

    chosen: frozenset[int]  # ranks the user asked for by number: they exchange all small values

    def post(self, key: str, payload: bytes) -> None: ...
    def want(self, key: str, rank: int, why: str) -> bytes: ...
    def meet(self, rank: int) -> None: ...


class Exchange:
    """The Python side of the native process groups. `peers` is None where this rank is emulated all alone."""

    def __init__(
        self, native: ModuleType, record: CollectiveRecord, peers: Peers | None, buffers: Buffers | None = None
    ) -> None:
        self.native = native
        self.buffers = buffers
        self.buffer_bytes = 0  # taken by NCCL so far
        self.record = record
        self.peers = peers
        self.stand_ins: dict[str, int] = {}  # host data taken to be like this rank's own, by op
        self.assumed: set[int] = set()  # ranks whose integers on the device were taken to be like this rank's own
        self.worlds = 0  # how often the program has joined a process group: names of groups begin anew each time
        self._met: set[int] = set()
        self._names: dict[int, str] = {}  # by communicator, the same in all its ranks and only there
        self._together: set[frozenset[int]] = set()  # groups of which every rank is known to be emulated
        self._lock = threading.Lock()

    # ---- called by the native side ----
    def communicator(self, backend: str, name: str, ranks: list[int], rank: int) -> int:
        number = self.record.communicator(backend, name, ranks, rank)
        if self.buffers is not None and backend == "nccl":
            wanted = self.buffers.bytes(ranks)
            self.native.take_outside(torch.cuda.current_device(), wanted)
            self.buffer_bytes += wanted
        digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:12]
        name = f"{self.worlds}/{backend}/{name}/{digest}"
        before = sum(other.startswith(name) for other in self._names.values())
        self._names[number] = f"{name}/{before}"
        return number

    def call(
        self,
        communicator: int,
        op: str,
        dtype: str,
        elements_in: int,
        elements_out: int,
        peer: int,
        reduction: str,
        splits_in: list[int],
        splits_out: list[int],
    ) -> int:
        call = CollectiveCall(
            communicator, op, dtype, elements_in, elements_out, peer, reduction, tuple(splits_in), tuple(splits_out)
        )
        with self._lock:
            return self.record.call(call)

    def site(self, stack: tuple[tuple[CodeType, int], ...]) -> int:
        with self._lock:
            return self.record.site(stack)

    def meet(self, rank: int) -> None:
        if self.peers is not None and rank not in self._met:
            self._met.add(rank)
            self.peers.meet(rank)

    def exchange(
        self,
        communicator: int,
        op: str,
        sequence: int,
        peer: int,
        reduction: str,
        splits: list[int],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> Callable[[], None] | None:
        """Gives this rank's values away. The result, if any, waits for the others' and leaves them in the outputs.
        `splits`: how much of its input an uneven all_to_all gives to each rank."""
        group = self.record.communicators[communicator]
        tensors = [tensor for tensor in (*inputs, *outputs) if tensor is not None]
        host = _carries_objects() or any(not tensor.is_cuda for tensor in tensors)
        exact = all(not tensor.is_floating_point() for tensor in tensors)
        exact = exact or (host and _called_by_program() and all(tensor.numel() <= MOST_FLOATS for tensor in tensors))
        if splits and not host and not exact:
            # How much there is differs by rank, so the others cannot tell whether it is little enough to be passed on.
            self._leave(outputs, [None] * len(outputs))
            return None
        given = [self._value(tensor) for tensor in inputs]
        if op == "all_to_all" and len(inputs) == 1:
            given = split(given[0], splits, len(group.ranks))
        wanted = sources(op, group.rank, len(group.ranks), peer)
        asked = self._asked(group, op, wanted, host, exact)
        if _carries_objects() and self.peers is None and op in FROM_ONE and group.rank not in wanted:
            raise MayaError(
                f"rank {group.ranks[group.rank]} is emulated alone, and reads objects from rank {group.ranks[peer]} ({op}).",
                "Run the program with its ranks: maya run -- torchrun ...",
            )
        key = f"{self._names[communicator]}/{'message' if op in POINT_TO_POINT else op}/{sequence}"
        if self._gives(group, op, peer, host, exact):
            assert self.peers is not None
            to = peer if op == "send" else -1
            self.peers.post(f"{key}/{group.rank}/{to}", pickle.dumps([_packed(value) for value in given]))
        if self._meets_all(group, op, host, exact):
            self._together.add(frozenset(group.ranks))
        if not outputs:
            return None
        if host and op not in POINT_TO_POINT and len(asked) + (group.rank in wanted) < len(wanted):
            self.stand_ins[op] = self.stand_ins.get(op, 0) + 1
        if exact and not host and any(value is not None for value in given):
            self.assumed.update(group.ranks[place] for place in {*wanted} - {*asked, group.rank})

        def settle() -> None:
            gave: dict[int, Values] = {group.rank: given}
            for place in asked:
                to = group.rank if op == "recv" else -1
                assert self.peers is not None
                why = f"{op} on {group.backend} group '{group.name}'"
                packed = self.peers.want(f"{key}/{place}/{to}", group.ranks[place], why)
                gave[place] = [_unpacked(value) for value in pickle.loads(packed)]

            def giver(place: int) -> Values:
                return gave.get(place, given)

            self._leave(outputs, outcome(op, group.rank, len(group.ranks), peer, reduction, giver, outputs))

        if asked:
            # Until it has settled, what this rank will hold is not known.
            self._leave([tensor for tensor in outputs if tensor.is_cuda], [None] * len(outputs))
            return settle
        settle()
        return None

    # ---- who is asked, and who is told ----
    def _asked(self, group: Communicator, op: str, wanted: range, host: bool, exact: bool) -> list[int]:
        if self.peers is None:
            return []
        others = [place for place in wanted if place != group.rank]
        if op in FROM_ONE:
            if host or exact:
                return others
        elif self._meets_all(group, op, host, exact) or (exact and self._is_together(group)):
            return others
        if group.ranks[group.rank] not in self.peers.chosen:
            return []
        return [place for place in others if group.ranks[place] in self.peers.chosen]

    def _gives(self, group: Communicator, op: str, peer: int, host: bool, exact: bool) -> bool:
        if self.peers is None or op in ("recv", "barrier") or len(group.ranks) == 1:
            return False
        if op in TO_MANY and group.rank != peer:
            return False
        if op in TO_MANY or op == "send":
            if host or exact:
                return True
        elif exact and len(group.ranks) <= EXACT_GROUP:
            return True  # somebody may know already that all are emulated
        return group.ranks[group.rank] in self.peers.chosen and len(self.peers.chosen) > 1

    def _meets_all(self, group: Communicator, op: str, host: bool, exact: bool) -> bool:
        """Does every rank of the group come to know every other's values in this call?"""
        several = op not in (*FROM_ONE, "send", "barrier")
        return self.peers is not None and several and host and exact and 1 < len(group.ranks) <= EXACT_GROUP

    def _is_together(self, group: Communicator) -> bool:
        return any(met.issuperset(group.ranks) for met in self._together)

    # ---- values in and out of tensors ----
    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        most = MOST_FLOATS if tensor.is_floating_point() else MOST_INTEGERS
        if tensor.numel() > most and not _carries_objects():
            return None
        with torch.no_grad():
            value = self.native.host_value(tensor) if tensor.is_cuda else tensor.detach()
            # A copy: a shadow may go, and a tensor be written to, before the others' values have come.
            return None if value is None else value.clone(memory_format=torch.contiguous_format)

    def _leave(self, outputs: list[torch.Tensor], values: Values) -> None:
        known: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for output, value in zip(outputs, values, strict=False):
                if value is None or value.numel() != output.numel():
                    if output.is_cuda:
                        self.native.forget(output)
                    continue
                value = value.to(output.dtype).reshape(output.shape)
                if output.is_cuda:
                    known.append((output, value))
                else:
                    output.detach().copy_(value)
            if known:
                self.native.remember_parts([output for output, _ in known], [value for _, value in known])


def _packed(value: torch.Tensor | None) -> tuple[str, tuple[int, ...], bytes] | None:
    if value is None:
        return None
    plain = value.detach().clone(memory_format=torch.contiguous_format)
    return (
        str(plain.dtype).removeprefix("torch."),
        tuple(plain.shape),
        plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def _unpacked(packed: tuple[str, tuple[int, ...], bytes] | None) -> torch.Tensor | None:
    if packed is None:
        return None
    dtype, shape, raw = packed
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)
