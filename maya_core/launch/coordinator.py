"""The coordinator of a job's emulated processes, in the command that started them: it passes values between ranks, decides which further
ranks are needed, and notices when nobody can continue.

Processes connect by a private socket and send the messages of `protocol.py`. Only `Stuck` means that the job hangs; any other exception in
a handler is a bug of the coordinator's, and is reported as what it is.
"""

from __future__ import annotations

import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maya_core.collectives.store_keys import LocalKeys
from maya_core.launch import protocol
from maya_core.launch.protocol import Message, Notice
from maya_core.sockets import folder_for_sockets

Sender = tuple[int, int]  # process and thread
POLLS = 20  # a process that has asked this often for a store key that does not exist is waiting for it
POLLING_S = 2.0  # a process that has asked for this long needs a rank that sets the key
MOST_RANKS = 64  # that are started for the sake of a store key

AnswerT = TypeVar("AnswerT")
Handlers = dict[type[Message[Any]], Callable[[Sender, Any], Any]]


class Stuck(Exception):
    """What somebody waits for cannot come any more: the job would hang."""


class Wait(NamedTuple):
    """What a thread waits for."""

    what: str
    arrived: Callable[[], bool]  # then the thread is about to continue
    from_anyone: bool  # it is not known which rank it comes from


@dataclass
class Member:
    """A process of the job."""

    rank: int | None = None  # None: has not joined a process group (yet)
    waits: dict[int, Wait] = field(default_factory=dict)  # by thread
    idle: bool = False  # it waits for its own children
    polls: int = 0  # questions about store keys in a row that brought nothing new
    polling_since: float = 0.0

    @property
    def active(self) -> bool:
        return not self.idle and all(wait.arrived() for wait in self.waits.values())

    @property
    def working(self) -> bool:
        return self.active and self.polls < POLLS


class Coordinator:
    """Use as a context manager. Whoever starts processes asks for ranks with `NextRank`, and reports with `RankEnded` when one has ended."""

    def __init__(self, ranks: tuple[int, ...] = (), on_step: Callable[[int, int], None] | None = None) -> None:
        self._chosen = ranks  # by the user; without, rank 0 and the ranks that it exchanges messages with
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
        self._starting = 0  # handed out, not yet connected
        self._gone: set[int] = set()  # ranks whose process has ended
        self.failed: dict[int, int] = {}  # exit codes of ranks that ended with one, the first one first
        self._payloads: dict[str, bytes] = {}
        self._keys = LocalKeys(self._key_missing)
        self._stuck: str | None = None
        self._failure: protocol.Failed | None = None  # of a notice, whose sender does not wait for an answer
        self._handlers: Handlers = self._message_table()

    def __enter__(self) -> Coordinator:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._listener.close()
        self._folder.cleanup()
        if kind is None and self._failure is not None:
            raise self._failure.as_error()

    def _message_table(self) -> Handlers:
        """The handler of every message."""
        return {
            protocol.Joined: self._joined,
            protocol.StepDone: self._step_done,
            protocol.Idle: self._idle,
            protocol.WorldSize: self._world_size,
            protocol.FirstJob: lambda *_: not self._world,
            protocol.NextRank: self._next_rank,
            protocol.RankEnded: self._rank_ended,
            protocol.StartNoMore: self._start_no_more,
            protocol.Needs: self._needs,
            protocol.Post: self._post,
            protocol.Want: self._want,
            protocol.GetKey: self._get_key,
            protocol.HasKey: self._has_key,
            protocol.SetKey: lambda sender, m: self._changed_keys(sender, self._keys.set, m.key, m.value),
            protocol.AddToKey: self._add_to_key,
            protocol.AppendToKey: lambda sender, m: self._changed_keys(sender, self._keys.append, m.key, m.value),
            protocol.CompareSetKey: lambda sender, m: self._changed_keys(
                sender, self._keys.compare_set, m.key, m.expected, m.desired
            ),
            protocol.DeleteKey: lambda sender, m: self._changed_keys(sender, self._keys.delete, m.key),
            protocol.CountKeys: lambda sender, m: self._changed_keys(sender, self._keys.count, m.prefix),
        }

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
            hello: protocol.Hello = connection.recv()
            process, thread, main = hello.process, hello.thread, hello.main
            with self._changed:
                self._connections[process] += 1
                if main:
                    self._members[process] = Member()
                    self._starting = max(0, self._starting - hello.expected)
            try:
                connection.send(True)
                while True:
                    message: Message[Any] = connection.recv()
                    reply = self._handled((process, thread), message)
                    if not isinstance(message, Notice):
                        connection.send(reply)
                    elif isinstance(reply, protocol.Failed):
                        self._failure = reply
            finally:
                with self._changed:
                    self._connections[process] -= 1
                    if main:
                        self._members.pop(process, None)
                    self._check()
                    self._changed.notify_all()

    def _handled(self, sender: Sender, message: Message[AnswerT]) -> protocol.Reply[AnswerT]:
        if self._failure is not None:
            return self._failure
        try:
            return protocol.Answer(self._handlers[type(message)](sender, message))
        except Stuck as stuck:
            return protocol.Hangs(str(stuck))
        except Exception as error:  # sent to the process, which reports it; the coordinator serves the others
            return protocol.Failed(f"{type(error).__name__}: {error}", traceback.format_exc())

    # ---- handlers ----
    def _joined(self, sender: Sender, message: protocol.Joined) -> None:
        with self._changed:
            self._members[sender[0]].rank = message.rank
            self._process_of[message.rank] = sender[0]
            self._known.add(message.rank)
        self._step_done(sender, protocol.StepDone(0))

    def _step_done(self, sender: Sender, message: protocol.StepDone) -> None:
        rank = self._members[sender[0]].rank
        if self._on_step and rank is not None:
            self._on_step(rank, message.step)

    def _idle(self, sender: Sender, message: protocol.Idle) -> None:
        with self._changed:
            self._members[sender[0]].idle = message.idle
            self._check()

    def _world_size(self, sender: Sender, message: protocol.WorldSize) -> None:
        with self._changed:
            self._world = message.size
            for rank in self._chosen or (0,):
                if rank < message.size:
                    self._need(rank)

    def _next_rank(self, sender: Sender, message: protocol.NextRank) -> tuple[int | None, bool]:
        with self._changed:
            working = sum(member.working for member in self._members.values()) + self._starting
            if not self._queued or working >= message.limit:
                return None, bool(self._queued)
            self._starting += 1
            return self._queued.pop(0), True

    def _rank_ended(self, sender: Sender, message: protocol.RankEnded) -> None:
        with self._changed:
            self._gone.add(message.rank)
            if message.code:
                self.failed.setdefault(message.rank, message.code)
            if message.rank not in self._process_of:  # it never connected, and is no longer starting
                self._starting = max(0, self._starting - 1)
            self._check()
            self._changed.notify_all()

    def _start_no_more(self, sender: Sender, message: protocol.StartNoMore) -> None:
        with self._changed:
            self._known.update(self._queued)
            self._gone.update(self._queued)
            self._queued.clear()
            self._check()
            self._changed.notify_all()

    def _needs(self, sender: Sender, message: protocol.Needs) -> None:
        with self._changed:
            if not self._chosen:
                self._need(message.rank)

    def _post(self, sender: Sender, message: protocol.Post) -> None:
        with self._changed:
            self._payloads[message.key] = message.payload
            self._changed.notify_all()

    def _want(self, sender: Sender, message: protocol.Want) -> bytes:
        key, rank = message.key, message.rank
        with self._changed:
            self._need(rank)
            what = f"data from rank {rank} in {message.why}"
            self._wait(sender, lambda: key in self._payloads, what, lambda: self._ended(rank))
            return self._payloads[key]

    def _get_key(self, sender: Sender, message: protocol.GetKey) -> bytes:
        key = message.key
        with self._changed:
            self._wait(sender, lambda: self._keys.known(key), f"the store key '{key}'", lambda: False, True)
            return self._changed_keys(sender, self._keys.get, key)

    def _has_key(self, sender: Sender, message: protocol.HasKey) -> bool:
        with self._changed:
            if self._keys.known(message.key):
                return self._changed_keys(sender, self._keys.known, message.key)
            self._polled(self._members[sender[0]])
            return False

    def _add_to_key(self, sender: Sender, message: protocol.AddToKey) -> int:
        with self._changed:
            if message.amount:
                return self._changed_keys(sender, self._keys.add, message.key, message.amount)
            self._polled(self._members[sender[0]])  # adding 0 is a way to ask
            return self._keys.add(message.key, 0)

    def _changed_keys(self, sender: Sender, method: Callable[..., AnswerT], *arguments: Any) -> AnswerT:
        """Calls a method of the store. Its sender has learnt something, or told something: it is not just polling."""
        with self._changed:
            result = method(*arguments)
            self._members[sender[0]].polls = 0
            self._changed.notify_all()
            return result

    # ---- inside, with the lock held ----
    def _ended(self, rank: int) -> bool:
        """Its process has ended, and everything that it sent was received."""
        return rank in self._gone and not self._connections[self._process_of.get(rank, 0)]

    def _key_missing(self, key: str) -> bytes:
        raise Stuck(f"store key '{key}' was deleted")

    def _need(self, rank: int) -> None:
        if rank not in self._known:
            self._known.add(rank)
            self._queued.append(rank)
            self._changed.notify_all()

    def _need_another(self) -> bool:
        """Any rank may set a store key: the next one is started, if there is one."""
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
        sender: Sender,
        arrived: Callable[[], bool],
        what: str,
        hopeless: Callable[[], bool],
        from_anyone: bool = False,
    ) -> None:
        process, thread = sender
        member = self._members[process]
        while not arrived():
            member.waits[thread] = Wait(what, arrived, from_anyone)
            self._check()
            try:
                if self._stuck or hopeless():
                    name = f"rank {member.rank}" if member.rank is not None else "this process"
                    raise Stuck(self._stuck or f"{name} waits for {what}, which has ended")
                self._changed.wait(0.5)
            finally:
                member.waits.pop(thread, None)

    def _check(self) -> None:
        """If everybody waits and nobody is about to start, nobody will ever continue."""
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
