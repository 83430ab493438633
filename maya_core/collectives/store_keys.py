"""The keys and values behind torch.distributed's stores. This module does not need torch, because the command that starts the ranks holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from maya_core.errors import MayaError


class Keys(Protocol):
    """The keys and values that all stores of a job share."""

    def get(self, key: str) -> bytes: ...  # waits until the key is set
    def known(self, key: str) -> bool: ...
    def set(self, key: str, value: bytes) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: bytes) -> None: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def delete(self, key: str) -> bool: ...
    def count(self, prefix: str) -> int: ...


class LocalKeys:
    """Keys in this process. A rank that is emulated alone uses them as they are; `missing` handles a key that nobody has set."""

    def __init__(self, missing: Callable[[str], bytes] | None = None) -> None:
        self._keys: dict[str, bytes] = {}
        self._missing = missing or _raise_unset

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

    def count(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self._keys)


def _raise_unset(key: str) -> bytes:
    raise MayaError(
        f"the program waits for the store key '{key}', and no emulated rank sets it.",
        "Emulate the rank that sets it, too: maya run --ranks all, or list the ranks by number.",
    )
