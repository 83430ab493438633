"""Runs a script as rank RANK of WORLD_SIZE without the other ranks, for scripts whose collectives need no values of others: alone.py SCRIPT ...

The real TCPStore waits for the other ranks; here the rank stores the keys itself and assumes that the others have set theirs.
"""

import os
import runpy
import sys
from datetime import timedelta

import torch.distributed as dist

NCCL_ID_BYTES = 128


class OwnKeys(dist.Store):
    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.keys[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.keys.get(key, bytes(NCCL_ID_BYTES))

    def add(self, key: str, amount: int) -> int:
        self.keys[key] = str(int(self.keys.get(key, b"0")) + amount).encode()
        return int(self.keys[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pass

    def delete_key(self, key: str) -> bool:
        return self.keys.pop(key, None) is not None


store = OwnKeys()  # C++ does not keep the Python half alive
sys.modules["torch.distributed.rendezvous"]._create_c10d_store = lambda *args, **kwargs: store
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
