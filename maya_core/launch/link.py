"""An emulated process's end of the line to the command that started it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

HUNG = 3  # exit code of a rank that would wait for ever


class WouldHang(SystemExit):
    """This rank would wait for ever: ends it, past `except Exception`."""

    def __init__(self, why: str) -> None:
        super().__init__(HUNG)
        self.why = why


class Link:
    """Peers and Keys of a rank, answered by the coordinator. Each thread has a connection of its own."""

    def __init__(self, socket: Path, chosen: frozenset[int]) -> None:
        self.socket = socket
        self.chosen = chosen
        self.hung = ""  # why, if this rank would wait for ever
        self._closed = False
        self.reconnect()

    def close(self) -> None:
        """Leaves the job, and lives on."""
        self._closed = True
        self._main.close()
        self._own = threading.local()

    def reconnect(self, socket: Path | None = None, chosen: frozenset[int] | None = None) -> None:
        """Connects this process; a fork is another process than its parent, and may be of another job."""
        self.socket = socket or self.socket
        self.chosen = self.chosen if chosen is None else chosen
        self._own = threading.local()
        self._process = os.getpid()
        self._main: Connection = self._connect(main=True)
        threading.Thread(target=self._die_with_parent, daemon=True).start()

    # ---- Peers ----
    def post(self, key: str, payload: bytes) -> None:
        self._tell("post", key, payload)

    def want(self, key: str, rank: int, why: str) -> bytes:
        payload = self._ask("want", key, rank, why)
        assert isinstance(payload, bytes)
        return payload

    def meet(self, rank: int) -> None:
        self._ask("meet", rank)  # heard before this process can end

    # ---- life ----
    def rank(self, rank: int) -> None:
        self._ask("rank", rank)

    def step(self, step: int) -> None:
        self._tell("step", step)

    def idle(self, idle: bool) -> None:
        self._tell("idle", idle)

    # ---- for a process that starts the ranks ----
    def world(self, world_size: int) -> None:
        self._ask("world", world_size)

    def next_rank(self, limit: int) -> tuple[int | None, bool]:
        rank, more = self._ask("next", limit)
        return rank, more

    def ended(self, rank: int) -> None:
        self._ask("ended", rank)

    def drop_queued(self) -> None:
        self._ask("drop")

    # ---- Keys ----
    def get(self, key: str) -> bytes:
        return self._key("get", key)

    def known(self, key: str) -> bool:
        return bool(self._key("known", key))

    def set(self, key: str, value: bytes) -> None:
        self._key("set", key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._key("add", key, amount))

    def append(self, key: str, value: bytes) -> None:
        self._key("append", key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._key("compare_set", key, expected, desired))

    def delete(self, key: str) -> bool:
        return bool(self._key("delete", key))

    def count(self, prefix: str) -> int:
        return int(self._key("count", prefix))

    # ---- inside ----
    def _key(self, method: str, *arguments: Any) -> Any:
        return self._ask("key", method, arguments)

    def _connect(self, main: bool = False) -> Connection:
        connection: Connection = Client(str(self.socket), family="AF_UNIX")
        connection.send((self._process, threading.get_ident(), main))
        connection.recv()
        return connection

    def _connection(self) -> Connection:
        if not hasattr(self._own, "connection"):
            self._own.connection = self._connect()
        connection: Connection = self._own.connection
        return connection

    def _tell(self, method: str, *arguments: Any) -> None:
        self._connection().send((method, arguments, False))

    def _ask(self, method: str, *arguments: Any) -> Any:
        connection = self._connection()
        connection.send((method, arguments, True))
        result, error = connection.recv()
        if error is not None:
            self.hung = str(error)
            raise WouldHang(self.hung)
        return result

    def _die_with_parent(self) -> None:
        with suppress(EOFError, OSError):
            self._main.recv()
        if self._closed:
            return
        shutil.rmtree(self.socket.parent, ignore_errors=True)  # the coordinator may have been killed
        if os.getpgrp() == self._process:  # a rank has a group of its own, with its data loaders' workers
            os.killpg(self._process, signal.SIGKILL)
        os.kill(self._process, signal.SIGKILL)
