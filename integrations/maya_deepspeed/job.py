"""Runs the ranks of a `deepspeed` job on this machine, each with the command and environment that DeepSpeed would give it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from maya_core.errors import MayaError
from maya_core.integration import RankLauncher, RankProcess, RankSetting, World

Hosts = dict[str, list[int]]  # by the name of the host: the GPUs that are used
Files = tuple[IO[bytes], IO[bytes]]

SLURM_AND_MPI = ("openmpi", "mpich", "impi", "slurm", "mvapich")  # these start the script without --local_rank


def run_job(
    launcher: RankLauncher,
    runner: ModuleType,
    args: Namespace,
    hosts: Hosts,
    files: Files | None = None,
    on_start: Callable[[RankProcess], None] = lambda _: None,
) -> int:
    """Runs the ranks of a `deepspeed` command, with their output in `files` if given. Returns the exit code of the first that failed, or 0."""
    world = world_of(hosts)
    several = world.nodes > 1 or args.force_multi
    exported = _exported(runner) if several else {}
    argument = not args.no_local_rank and not (several and args.launcher.lower() in SLURM_AND_MPI)
    return launcher.run(
        world,
        lambda rank: program_of(args, rank % world.ranks_per_node if argument else None),
        lambda rank: {**exported, **rank_environment(args, hosts, world, rank)},
        RankSetting(output=files),
        forks=False,
        on_start=on_start,
    )


def world_of(hosts: Hosts) -> World:
    if not hosts:
        raise MayaError("no GPU is left on any host.", "Exclude fewer GPUs or hosts.")
    used = {name: len(slots) for name, slots in hosts.items()}
    if len(set(used.values())) > 1:
        most, least = max(used, key=used.__getitem__), min(used, key=used.__getitem__)
        raise MayaError(
            f"{most} has {used[most]} GPUs and {least} has {used[least]}: nodes of different sizes cannot be emulated.",
            "Use the same number on each: --num_gpus N, or other slots in --include.",
        )
    return World(len(hosts), next(iter(used.values())))


def program_of(args: Namespace, local_rank: int | None) -> list[str]:
    """The command that a rank runs."""
    python = [] if args.no_python else [sys.executable, "-u", *(["-m"] if args.module else [])]
    argument = [] if local_rank is None else [f"--local_rank={local_rank}"]
    return [*python, args.user_script, *argument, *args.user_args]


def rank_environment(args: Namespace, hosts: Hosts, world: World, rank: int) -> dict[str, str]:
    """The environment variables that deepspeed.launcher.launch sets for a rank."""
    node, local = divmod(rank, world.ranks_per_node)
    environment: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": world.size,
        "LOCAL_SIZE": world.ranks_per_node,
        "CROSS_RANK": node,
        "CROSS_SIZE": world.nodes,
        "MASTER_ADDR": args.master_addr or "127.0.0.1",  # nothing connects to it
        "MASTER_PORT": args.master_port,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, list(hosts.values())[node])),
    }
    return {name: str(value) for name, value in environment.items()}


def _exported(runner: ModuleType) -> dict[str, str]:
    """Further variables of ranks on other machines: the folder to import from, and those in .deepspeed_env files."""
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": path}
    for folder in runner.DEEPSPEED_ENVIRONMENT_PATHS:
        file = Path(folder) / runner.DEEPSPEED_ENVIRONMENT_NAME
        if file.is_file():
            pairs = (line.partition("=") for line in file.read_text().splitlines() if "=" in line)
            variables.update({name: value for name, _, value in pairs})
    return variables
