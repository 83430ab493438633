"""The meeting point of a job's emulated processes, in the command that started them: what they tell one another,
which further ranks they need, and whether any of them can still go on.

Processes connect by a private socket. A message is (method, arguments); what needs an answer gets one.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from maya_core.collectives.store_keys import LocalKeys
from maya_core.sockets import folder_for_sockets

Who = tuple[int, int]  # process and thread
POLLS = 20  # a process that has asked so often for a store key that is not there is waiting for it
POLLING_S = 2.0  # and one that asks for so long needs a rank that sets it
MOST_RANKS = 64  # to be started for the sake of a store key


class Stuck(Exception):
    """Nothing that is waited for can come any more."""


class Wait(NamedTuple):
    what: str
    there: Callable[[], bool]  # it has come, and the thread is about to go on
    from_anyone: bool  # which rank it comes from is not known


@dataclass
class Member:
    """A process of the job."""

    rank: int | None = None  # None: has not joined a process group (yet)
    waits: dict[int, Wait] = field(default_factory=dict)  # by thread
    idle: bool = False  # waits for its own children
    polls: int = 0  # questions about store keys in a row that told it nothing new
    polling_since: float = 0.0

    @property
    def active(self) -> bool:
        return not self.idle and all(wait.there() for wait in self.waits.values())

    @property
    def working(self) -> bool:
        return self.active and self.polls < POLLS


class Coordinator:
    """Use as a context manager. Who starts processes asks for ranks by `on_next`, and says by `on_ended` when one is gone."""

    def __init__(self, ranks: tuple[int, ...] = (), on_step: Callable[[int, int], None] | None = None) -> None:
        self._chosen = ranks  # by the user; else rank 0, and whom it meets
        self._on_step = on_step
        self._folder = tempfile.TemporaryDirectory(prefix="maya-", dir=folder_for_sockets(), ignore_cleanup_errors=True)
        self.socket = Path(self._folder.name) / "job"
        self._listener = Listener(str(self.socket), family="AF_UNIX", backlog=64)
        self._changed = threading.Condition()
        self._members: dict[int, Member] = {}  # by process
        self._connections: Counter[int] = Counter()  # open ones, by process
        self._process_of: dict[int, int] = {}  # by rank
        self._world = 0  # how many ranks there are
        self._known: set[int] = set()  # ranks queued, running or ended
        self._queued: list[int] = []
        self._starting = 0  # handed out, not yet heard of
        self._gone: set[int] = set()  # ranks whose process has ended
        self._payloads: dict[str, bytes] = {}
        self._keys = LocalKeys(self._key_missing)
        self._stuck: str | None = None

    def __enter__(self) -> Coordinator:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._folder.cleanup()

    # ---- processes ----
    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """One thread of one process, until it ends."""
        with connection, suppress(EOFError, OSError):
            process, thread, main = connection.recv()
            with self._changed:
                self._connections[process] += 1
                if main:
                    self._members[process] = Member()
                    self._starting = max(0, self._starting - 1)
            try:
                connection.send(True)
                while True:
                    method, arguments, answer = connection.recv()
                    try:
                        result, error = getattr(self, "on_" + method)((process, thread), *arguments), None
                    except Exception as raised:
                        result, error = None, str(raised)
                    if answer:
                        connection.send((result, error))
            finally:
                with self._changed:
                    self._connections[process] -= 1
                    if main:
                        self._members.pop(process, None)
                    self._check()
                    self._changed.notify_all()

    # ---- what processes say; `who` is (process, thread) ----
    def on_rank(self, who: Who, rank: int) -> None:
        with self._changed:
            self._members[who[0]].rank = rank
            self._process_of[rank] = who[0]
            self._known.add(rank)
        self.on_step(who, 0)

    def on_step(self, who: Who, step: int) -> None:
        rank = self._members[who[0]].rank
        if self._on_step and rank is not None:
            self._on_step(rank, step)

    def on_idle(self, who: Who, idle: bool) -> None:
        with self._changed:
            self._members[who[0]].idle = idle
            self._check()

    def on_world(self, who: Who, world_size: int) -> None:
        """That process starts the ranks of the job."""
        with self._changed:
            self._world = world_size
            for rank in self._chosen or (0,):
                if rank < world_size:
                    self._need(rank)

    def on_next(self, who: Who, limit: int) -> tuple[int | None, bool]:
        """A rank to start now, if fewer than `limit` processes are at work; and whether there are any to start later."""
        with self._changed:
            at_work = sum(member.working for member in self._members.values()) + self._starting
            if not self._queued or at_work >= limit:
                return None, bool(self._queued)
            self._starting += 1
            return self._queued.pop(0), True

    def on_ended(self, who: Who, rank: int) -> None:
        """The process of that rank is gone. One that never connected is no longer starting."""
        with self._changed:
            self._gone.add(rank)
            if rank not in self._process_of:
                self._starting = max(0, self._starting - 1)
            self._check()
            self._changed.notify_all()

    def on_drop(self, who: Who) -> None:
        """No more ranks are to be started."""
        with self._changed:
            self._known.update(self._queued)
            self._gone.update(self._queued)
            self._queued.clear()
            self._check()
            self._changed.notify_all()

    def on_meet(self, who: Who, rank: int) -> None:
        with self._changed:
            if not self._chosen:
                self._need(rank)

    def on_post(self, who: Who, key: str, payload: bytes) -> None:
        with self._changed:
            self._payloads[key] = payload
            self._changed.notify_all()

    def on_want(self, who: Who, key: str, rank: int, why: str) -> bytes:
        with self._changed:
            self._need(rank)
            self._wait(who, lambda: key in self._payloads, f"data from rank {rank} in {why}", lambda: self._ended(rank))
            return self._payloads[key]

    def on_key(self, who: Who, method: str, arguments: tuple[Any, ...]) -> Any:
        with self._changed:
            if method == "get":
                key = arguments[0]
                self._wait(who, lambda: self._keys.known(key), f"the store key '{key}'", lambda: False, True)
            result = getattr(self._keys, method)(*arguments)
            if (method == "known" and not result) or (method == "add" and not arguments[1]):
                self._polled(self._members[who[0]])
            else:
                self._members[who[0]].polls = 0
                self._changed.notify_all()
            return result

    # ---- inside, with the lock held ----
    def _ended(self, rank: int) -> bool:
        """Gone, and all it had to say was heard."""
        return rank in self._gone and not self._connections[self._process_of.get(rank, 0)]

    def _key_missing(self, key: str) -> bytes:
        raise Stuck(f"store key '{key}' is gone")

    def _need(self, rank: int) -> None:
        if rank not in self._known:
            self._known.add(rank)
            self._queued.append(rank)
            self._changed.notify_all()

    def _need_another(self) -> bool:
        """Any rank may set a store key: the next is started, if there is one."""
        rank = next((rank for rank in range(self._world) if rank not in self._known), None)
        if rank is None or len(self._known) >= MOST_RANKS:
            return False
        self._need(rank)
        return True

    def _polled(self, member: Member) -> None:
        now = time.monotonic()
        member.polling_since = member.polling_since if member.polls else now
        member.polls += 1
        nobody_else = not self._queued and not self._starting and not any(one.working for one in self._members.values())
        if nobody_else and now - member.polling_since > POLLING_S and self._need_another():
            member.polls = 0

    def _wait(
        self,
        who: Who,
        there: Callable[[], bool],
        what: str,
        hopeless: Callable[[], bool],
        from_anyone: bool = False,
    ) -> None:
        process, thread = who
        member = self._members[process]
        while not there():
            member.waits[thread] = Wait(what, there, from_anyone)
            self._check()
            try:
                if self._stuck or hopeless():
                    name = f"rank {member.rank}" if member.rank is not None else "this process"
                    raise Stuck(self._stuck or f"{name} waits for {what}, which has ended")
                self._changed.wait(0.5)
            finally:
                member.waits.pop(thread, None)

    def _check(self) -> None:
        """If everybody waits and nobody is about to start, nobody will ever go on."""
        members = self._members.values()
        someone_waits = any(member.waits for member in members)
        someone_works = bool(self._queued or self._starting) or any(member.active for member in members)
        if self._stuck is None and someone_waits and not someone_works:
            if any(wait.from_anyone for member in members for wait in member.waits.values()) and self._need_another():
                return
            self._stuck = "; ".join(
                f"{'rank ' + str(member.rank) if member.rank is not None else 'a process'} waits for {wait.what}"
                for member in members
                for wait in member.waits.values()
            )
            self._changed.notify_all()
