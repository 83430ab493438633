"""The key-value stores of torch.distributed, backed by the emulation's keys instead of a socket or a file."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

from maya_core.collectives.store_keys import Keys

FIRST_FREE_PORT = 40_000  # given out where a program asks for any free port

# A wait with a shorter timeout than this really times out; a longer one ends when no rank can set the key any more.
SHORT = timedelta(minutes=1)
POLL_S = 0.02


class EmulatedStore(dist.Store):
    """Replaces TCPStore and FileStore. Stores of the same name share their keys across all ranks."""

    keys: Keys  # set on the class during an emulation
    alive: list[EmulatedStore] = []  # keeps the Python objects, because C++ references only their native half

    def __init__(self, name: str, timeout: timedelta | None) -> None:
        super().__init__()
        self._name = name
        self._timeout = timeout or timedelta(minutes=5)
        EmulatedStore.alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self.keys.set(self._own(key), _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.keys.get(self._own(key))

    def add(self, key: str, amount: int) -> int:
        return self.keys.add(self._own(key), amount)

    def append(self, key: str, value: str | bytes) -> None:
        self.keys.append(self._own(key), _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self.keys.compare_set(self._own(key), _bytes(expected), _bytes(desired))

    def check(self, keys: list[str]) -> bool:
        return all(self.keys.known(self._own(key)) for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._timeout
        if limit >= SHORT:
            for key in keys:
                self.keys.get(self._own(key))
            return
        deadline = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.check([key])]
                raise dist.DistStoreError(f"wait timeout after {limit}, keys: {', '.join(missing)}")
            time.sleep(POLL_S)

    def delete_key(self, key: str) -> bool:
        return self.keys.delete(self._own(key))

    def num_keys(self) -> int:
        return self.keys.count(self._own(""))

    # The names by which PrefixStore, which is C++, calls these two.
    deleteKey = delete_key
    getNumKeys = num_keys

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> EmulatedStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def _own(self, key: str) -> str:
        return f"{self._name}/{key}"


class TCPStore(EmulatedStore):
    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | None = None,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self.host = host_name
        self.port = port or FIRST_FREE_PORT + self.keys.add("ports", 1)
        self.libuvBackend = use_libuv
        super().__init__(f"port {self.port}", timeout)  # without the host, which has many names

    def num_keys(self) -> int:
        return super().num_keys() + 1  # TCPStore has one of its own, in which it counts workers

    getNumKeys = num_keys


class FileStore(EmulatedStore):
    def __init__(self, file_name: str, world_size: int = -1) -> None:
        self.path = file_name
        super().__init__(os.path.abspath(file_name), None)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
