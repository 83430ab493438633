"""Decides which ranks exchange real values in a collective, and passes those values on.

Most collectives need only shapes, so a rank can be emulated alone. Real values are exchanged where the program reads what
came from another rank: from the sender of host data and of small integers on the device (sizes, seeds, pickled objects);
among all ranks of a small group that gathers or reduces objects or host data, which from then on also exchange their
integers on the device; and among the ranks that the user chose to emulate. A rank that is not emulated is assumed to give
what this rank gives, because it runs the same program in lockstep.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Protocol

import torch

from maya_core.collectives.buffers import Buffers
from maya_core.collectives.collective_record import CollectiveRecord
from maya_core.collectives.values import FROM_ONE, TO_MANY, Values, outcome, sources, split
from maya_core.errors import MayaError
from maya_core.torch_seam.distributed import is_own_code
from maya_core.trace.communication import POINT_TO_POINT, CollectiveCall, Communicator

# In a group of at most this size (one node), every rank is emulated when the group gathers or reduces data that the host reads.
EXACT_GROUP = 8

# Larger tensors are not passed on.
MOST_FLOATS, MOST_INTEGERS = 2**16, 2**20

_thread = threading.local()


@contextmanager
def carrying_objects(native: ModuleType) -> Iterator[None]:
    """Marks the collectives of this block as carrying pickled objects: they travel by the device, but the host reads them."""
    before = _carries_objects()
    _thread.objects = True
    native.carry_objects(True)
    try:
        yield
    finally:
        _thread.objects = before
        native.carry_objects(before)


def _called_by_program() -> bool:
    """Whether the program called torch.distributed. A call that DTensor makes itself, to reduce a norm on the host for example, is not one."""
    frame = sys._getframe(2)
    return is_own_code(frame.f_globals.get("__name__"))


def _carries_objects() -> bool:
    return getattr(_thread, "objects", False)


class Peers(Protocol):
    """The connection to the other emulated ranks."""

    chosen: frozenset[int]  # ranks that the user requested by number: they exchange all small values

    def post(self, key: str, payload: bytes) -> None: ...
    def want(self, key: str, rank: int, why: str) -> bytes: ...
    def meet(self, rank: int) -> None: ...


@dataclass(frozen=True)
class _Transfer:
    """One collective or message of this rank, with all that decides which ranks exchange values in it."""

    group: Communicator
    op: str
    peer: int  # root, source or destination
    reduction: str
    host: bool  # the host reads the data: these are host tensors or pickled objects
    exact: bool  # the data are integers, or few enough numbers on the host, which ranks pass on exactly
    key: str  # the same in all ranks of the group

    @property
    def sources(self) -> range:
        """The places in the group whose values this rank receives."""
        return sources(self.op, self.group.rank, len(self.group.ranks), self.peer)


class Exchange:
    """The Python side of the native process groups. `peers` is None where this rank is emulated alone."""

    def __init__(
        self, native: ModuleType, record: CollectiveRecord, peers: Peers | None, buffers: Buffers | None = None
    ) -> None:
        self.native = native
        self.buffers = buffers
        self.buffer_bytes = 0  # of device memory that NCCL uses so far
        self.record = record
        self.peers = peers
        self.stand_ins: dict[
            str, int
        ] = {}  # how often host data of other ranks was assumed to equal this rank's, by op
        self.assumed: set[int] = set()  # ranks whose integers on the device were assumed to equal this rank's
        self.worlds = 0  # how often the program called init_process_group: group names start again each time
        self._met: set[int] = set()
        self._names: dict[int, str] = {}  # by communicator: a name that only its own ranks use
        self._together: set[frozenset[int]] = set()  # groups whose ranks are all known to be emulated
        self._lock = threading.Lock()

    # ---- called by native/collectives.cpp ----
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
        """Posts this rank's values for the others. If it needs theirs, returns a function that waits for them and writes them to the outputs.
        `splits` says how many elements of its input an uneven all_to_all sends to each rank."""
        group = self.record.communicators[communicator]
        tensors = [tensor for tensor in (*inputs, *outputs) if tensor is not None]
        host = _carries_objects() or any(not tensor.is_cuda for tensor in tensors)
        exact = all(not tensor.is_floating_point() for tensor in tensors)
        exact = exact or (host and _called_by_program() and all(tensor.numel() <= MOST_FLOATS for tensor in tensors))
        if splits and not host and not exact:
            # The amount differs by rank, so the others cannot know whether it is small enough to be passed on.
            self._write(outputs, [None] * len(outputs))
            return None
        mine = [self._value(tensor) for tensor in inputs]
        given, made_up = [value for value, _ in mine], any(made_up for _, made_up in mine)
        if op == "all_to_all" and len(inputs) == 1:
            given = split(given[0], splits, len(group.ranks))
        key = f"{self._names[communicator]}/{'message' if op in POINT_TO_POINT else op}/{sequence}"
        transfer = _Transfer(group, op, peer, reduction, host, exact, key)
        awaited = self._awaited(transfer)
        self._refuse_objects_from_nobody(transfer)
        self._post(transfer, given, made_up)
        if not outputs:
            return None
        self._note_assumptions(transfer, awaited, known=any(value is not None for value in given))
        settle = functools.partial(self._settle, transfer, awaited, given, made_up, outputs)
        if awaited:
            # Until the others' values arrive, nothing is known about the outputs.
            self._write([tensor for tensor in outputs if tensor.is_cuda], [None] * len(outputs))
            return settle
        settle()
        return None

    def _refuse_objects_from_nobody(self, transfer: _Transfer) -> None:
        group = transfer.group
        from_another = transfer.op in FROM_ONE and group.rank not in transfer.sources
        if _carries_objects() and self.peers is None and from_another:
            raise MayaError(
                f"rank {group.ranks[group.rank]} is emulated alone, but receives objects from rank {group.ranks[transfer.peer]} ({transfer.op}).",
                "Run the program with all its ranks: maya run -- torchrun ...",
            )

    def _post(self, transfer: _Transfer, given: Values, made_up: bool) -> None:
        if self._gives(transfer):
            assert self.peers is not None
            to = transfer.peer if transfer.op == "send" else -1
            packed = pickle.dumps((made_up, [_packed(value) for value in given]))
            self.peers.post(f"{transfer.key}/{transfer.group.rank}/{to}", packed)
        if self._meets_all(transfer):
            self._together.add(frozenset(transfer.group.ranks))

    def _note_assumptions(self, transfer: _Transfer, awaited: list[int], known: bool) -> None:
        """Counts what is assumed about ranks that are not emulated. `known`: this rank knows a value that it gives."""
        group, wanted = transfer.group, transfer.sources
        complete = len(awaited) + (group.rank in wanted) >= len(wanted)
        if transfer.host and transfer.op not in POINT_TO_POINT and not complete:
            self.stand_ins[transfer.op] = self.stand_ins.get(transfer.op, 0) + 1
        if transfer.exact and not transfer.host and known:
            self.assumed.update(group.ranks[place] for place in {*wanted} - {*awaited, group.rank})

    def _settle(
        self, transfer: _Transfer, awaited: list[int], given: Values, made_up: bool, outputs: list[torch.Tensor]
    ) -> None:
        """Waits for the values of the ranks at `awaited`, and writes the collective's result to the outputs."""
        group, op = transfer.group, transfer.op
        gave: dict[int, Values] = {group.rank: given}
        for place in awaited:
            to = group.rank if op == "recv" else -1
            assert self.peers is not None
            why = f"{op} on {group.backend} group '{group.name}'"
            packed = self.peers.want(f"{transfer.key}/{place}/{to}", group.ranks[place], why)
            also_made_up, values = pickle.loads(packed)
            made_up = made_up or also_made_up
            gave[place] = [_unpacked(value) for value in values]

        def giver(place: int) -> Values:
            return gave.get(place, given)

        size = len(group.ranks)
        self._write(outputs, outcome(op, group.rank, size, transfer.peer, transfer.reduction, giver, outputs), made_up)

    # ---- which ranks exchange values ----
    def _awaited(self, transfer: _Transfer) -> list[int]:
        """The places in the group whose values this rank waits for."""
        if self.peers is None:
            return []
        group = transfer.group
        others = [place for place in transfer.sources if place != group.rank]
        if transfer.op in FROM_ONE:
            if transfer.host or transfer.exact:
                return others
        elif self._meets_all(transfer) or (transfer.exact and self._is_together(group)):
            return others
        if group.ranks[group.rank] not in self.peers.chosen:
            return []
        return [place for place in others if group.ranks[place] in self.peers.chosen]

    def _gives(self, transfer: _Transfer) -> bool:
        """Whether this rank posts its values for others to read."""
        group, op = transfer.group, transfer.op
        if self.peers is None or op in ("recv", "barrier") or len(group.ranks) == 1:
            return False
        if op in TO_MANY and group.rank != transfer.peer:
            return False
        if op in TO_MANY or op == "send":
            if transfer.host or transfer.exact:
                return True
        elif transfer.exact and len(group.ranks) <= EXACT_GROUP:
            return True  # another rank may know already that all of them are emulated
        return group.ranks[group.rank] in self.peers.chosen and len(self.peers.chosen) > 1

    def _meets_all(self, transfer: _Transfer) -> bool:
        """Whether every rank of the group learns every other rank's values in this call."""
        several = transfer.op not in (*FROM_ONE, "send", "barrier")
        small = 1 < len(transfer.group.ranks) <= EXACT_GROUP
        return self.peers is not None and several and transfer.host and transfer.exact and small

    def _is_together(self, group: Communicator) -> bool:
        return any(met.issuperset(group.ranks) for met in self._together)

    # ---- values in and out of tensors ----
    def _value(self, tensor: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """A copy of the tensor's value on the host, and whether it is made up. Integers that nobody knows are passed on too, because
        sizes depend on them, on which the ranks must agree."""
        most = MOST_FLOATS if tensor.is_floating_point() else MOST_INTEGERS
        if tensor.numel() > most and not _carries_objects():
            return None, False
        with torch.no_grad():
            if not tensor.is_cuda:
                value, made_up = tensor.detach(), bool(self.native.is_made_up(tensor.untyped_storage()))
            elif (tensor.is_floating_point() and not self.native.is_known(tensor)) or (
                found := self.native.read_value(tensor)
            ) is None:
                return None, False
            else:
                value, unknown, routed = found
                made_up = unknown and not routed  # routers are assumed to choose evenly on every rank
            # A copy, because the program may write to the tensor before the other ranks' values arrive.
            return value.clone(memory_format=torch.contiguous_format), made_up

    def _write(self, outputs: list[torch.Tensor], values: Values, made_up: bool = False) -> None:
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
                    continue
                output.detach().copy_(value)
                if made_up:
                    self.native.mark_made_up(output.untyped_storage())
            if known:
                self.native.remember_parts([output for output, _ in known], [value for _, value in known], made_up)


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
