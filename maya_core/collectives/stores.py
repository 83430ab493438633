"""torch.distributed's key-value stores, kept by the emulation: no socket, no file, no peers to wait for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from maya_core.errors import MayaError


class Keys(Protocol):
    """Where the keys are."""

    def get(self, key: str) -> bytes: ...  # waits until there is one
    def known(self, key: str) -> bool: ...
    def set(self, key: str, value: bytes) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: bytes) -> None: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def delete(self, key: str) -> bool: ...
    def count(self) -> int: ...


class LocalKeys:
    """The keys of a rank that is emulated all alone."""

    def __init__(self, missing: Callable[[str], bytes] | None = None) -> None:
        self._keys: dict[str, bytes] = {}
        self._missing = missing or _nobody_sets

    def get(self, key: str) -> bytes:
        return self._keys[key] if key in self._keys else self._missing(key)

    def known(self, key: str) -> bool:
        return key in self._keys

    def set(self, key: str, value: bytes) -> None:
        self._keys[key] = value

    def add(self, key: str, amount: int) -> int:
        total = int(self._keys.get(key, b"0")) + amount
        self._keys[key] = str(total).encode()
        return total

    def append(self, key: str, value: bytes) -> None:
        self._keys[key] = self._keys.get(key, b"") + value

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self._keys.get(key, b"") == expected:
            self._keys[key] = desired
        return self._keys.get(key, expected)

    def delete(self, key: str) -> bool:
        return self._keys.pop(key, None) is not None

    def count(self) -> int:
        return len(self._keys)


def _nobody_sets(key: str) -> bytes:
    raise MayaError(
        f"the program waits for the store key '{key}', and no emulated rank sets it.",
        "Emulate the rank that does, too: maya run --ranks all, or the ranks by number.",
    )


class EmulatedStore(dist.Store):
    """In place of TCPStore and FileStore."""

    keys: Keys  # set on the class while the emulation is on
    alive: list[EmulatedStore] = []  # C++ holds stores without holding their Python half

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._timeout = kwargs.get("timeout") or timedelta(minutes=30)
        EmulatedStore.alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self.keys.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self.keys.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.keys.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self.keys.append(key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self.keys.compare_set(key, _bytes(expected), _bytes(desired))

    def check(self, keys: list[str]) -> bool:
        return all(self.keys.known(key) for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.keys.get(key)

    def delete_key(self, key: str) -> bool:
        return self.keys.delete(key)

    def num_keys(self) -> int:
        return self.keys.count()

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


class TCPStore(EmulatedStore):
    def __init__(self, host_name: str = "localhost", port: int = 0, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.host = host_name
        self.port = port


class FileStore(EmulatedStore):
    def __init__(self, file_name: str = "", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path = file_name


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
