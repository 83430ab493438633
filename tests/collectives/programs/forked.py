"""Ranks as forks of one process, which starts them quickly: `forked.py RANKS PROGRAM [ARGUMENT ...] [-- PROGRAM ...]`."""

import importlib
import os
import runpy
import sys
from pathlib import Path

import torch.multiprocessing as mp

HERE = Path(__file__).parent


def main(rank: int, world: int, commands: list[list[str]]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % 8), "LOCAL_WORLD_SIZE": "8"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for command in commands:
        sys.argv = [str(HERE / command[0]), *command[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    for name in ("fsdp", "pipelining", "tensor.parallel"):  # once, for all of them
        importlib.import_module(f"torch.distributed.{name}")
    commands = [text.split() for text in " ".join(sys.argv[2:]).split(" -- ")]
    mp.start_processes(main, (int(sys.argv[1]), commands), nprocs=int(sys.argv[1]), start_method="fork")
