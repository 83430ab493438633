"""An emulated process's connection to the coordinator of its job, which runs in the command that started it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TypeVar

from maya_core.launch import protocol
from maya_core.launch.protocol import Message, Notice

AnswerT = TypeVar("AnswerT")
HUNG = 3  # exit code of a rank that would wait for ever


class WouldHang(SystemExit):
    """Ends a rank that would wait for ever. `except Exception` in the program does not catch it."""

    def __init__(self, why: str) -> None:
        super().__init__(HUNG)
        self.why = why


class Link:
    """The Peers and Keys of a rank, which the coordinator answers. Each thread has its own connection."""

    def __init__(self, socket: Path, chosen: frozenset[int], at_once: bool = True) -> None:
        """`at_once`: the process takes part in the job from now on; otherwise with its first message, if it ever sends one."""
        self.socket = socket
        self.chosen = chosen
        self.hung = ""  # the reason, if this rank would wait for ever
        self.on_waited: Callable[[float], None] = lambda _: None  # called with the seconds that an answer took
        self.idles = False  # this process only waits for others
        self._closed = False
        self._expected = at_once
        self._own = threading.local()
        self._main: Connection | None = None
        if at_once:
            self.reconnect()

    def close(self) -> None:
        """Leaves the job; the process continues without it."""
        self._closed = True
        if self._main is not None:
            self._main.close()
        self._own = threading.local()

    def reconnect(self, socket: Path | None = None, chosen: frozenset[int] | None = None) -> None:
        """Connects this process. A fork is another process than its parent, and may belong to another job."""
        self.socket = socket or self.socket
        self.chosen = self.chosen if chosen is None else chosen
        self._own = threading.local()
        self._process = os.getpid()
        self._main = self._connect(main=True)
        threading.Thread(target=self._die_with_parent, args=(self._main,), daemon=True).start()

    # ---- Peers ----
    def post(self, key: str, payload: bytes) -> None:
        self._notify(protocol.Post(key, payload))

    def want(self, key: str, rank: int, why: str) -> bytes:
        return self._ask(protocol.Want(key, rank, why))

    def meet(self, rank: int) -> None:
        self._ask(protocol.Needs(rank))  # answered, so that it is known before this process can end

    # ---- the life of this process ----
    def rank(self, rank: int) -> None:
        self._ask(protocol.Joined(rank))

    def step(self, step: int) -> None:
        self._notify(protocol.StepDone(step))

    @property
    def takes_part(self) -> bool:
        """Whether the job knows of this process."""
        return self._main is not None

    def idle(self, idle: bool) -> None:
        self.idles = idle
        self._notify(protocol.Idle(idle))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what this process does while it only waits for others."""
        self.idle(True)
        try:
            yield
        finally:
            self.idle(False)

    # ---- for a process that starts the ranks ----
    def first_job(self) -> bool:
        """Whether no ranks were started yet: a run has one job."""
        return self._ask(protocol.FirstJob())

    def world(self, world_size: int) -> None:
        self._ask(protocol.WorldSize(world_size))

    def next_rank(self, limit: int) -> tuple[int | None, bool]:
        return self._ask(protocol.NextRank(limit))

    def ended(self, rank: int, code: int) -> None:
        self._ask(protocol.RankEnded(rank, code))

    def start_no_more(self) -> None:
        self._ask(protocol.StartNoMore())

    # ---- Keys ----
    def get(self, key: str) -> bytes:
        return self._ask(protocol.GetKey(key))

    def known(self, key: str) -> bool:
        return self._ask(protocol.HasKey(key))

    def set(self, key: str, value: bytes) -> None:
        self._ask(protocol.SetKey(key, value))

    def add(self, key: str, amount: int) -> int:
        return self._ask(protocol.AddToKey(key, amount))

    def append(self, key: str, value: bytes) -> None:
        self._ask(protocol.AppendToKey(key, value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask(protocol.CompareSetKey(key, expected, desired))

    def delete(self, key: str) -> bool:
        return self._ask(protocol.DeleteKey(key))

    def count(self, prefix: str) -> int:
        return self._ask(protocol.CountKeys(prefix))

    # ---- inside ----
    def _connect(self, main: bool = False) -> Connection:
        connection: Connection = Client(str(self.socket), family="AF_UNIX")
        connection.send(protocol.Hello(self._process, threading.get_ident(), main, self._expected))
        connection.recv()
        return connection

    def _connection(self) -> Connection:
        if self._main is None:
            self.reconnect()
        if not hasattr(self._own, "connection"):
            self._own.connection = self._connect()
        connection: Connection = self._own.connection
        return connection

    def _notify(self, notice: Notice) -> None:
        self._connection().send(notice)

    def _ask(self, message: Message[AnswerT]) -> AnswerT:
        connection = self._connection()
        asked = time.monotonic()
        connection.send(message)
        reply: protocol.Reply[AnswerT] = connection.recv()
        self.on_waited(time.monotonic() - asked)
        if isinstance(reply, protocol.Answer):
            return reply.value
        if isinstance(reply, protocol.Hangs):
            self.hung = reply.why
            raise WouldHang(reply.why)
        raise reply.as_error()

    def _die_with_parent(self, main: Connection) -> None:
        with suppress(EOFError, OSError):
            main.recv()
        if self._closed:
            return
        shutil.rmtree(self.socket.parent, ignore_errors=True)  # the coordinator may have been killed
        if os.getpgrp() == self._process:  # a rank has a group of its own, with its data loaders' workers
            os.killpg(self._process, signal.SIGKILL)
        os.kill(self._process, signal.SIGKILL)
