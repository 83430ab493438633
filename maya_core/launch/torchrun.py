"""torchrun: its command line read by its own parser, its ranks run on the emulated world. Checked with torch 2.13.
torch is imported where torchrun is called and not before: other commands start without it."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from maya_core.errors import MayaError
from maya_core.launch.fork_server import ForkServer
from maya_core.launch.link import Link
from maya_core.launch.ranks import RankProcess, RankSetting, run_ranks, start_rank
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World


def parse(command: list[str]) -> Namespace | None:
    """The arguments of a torchrun command (or of `python -m torch.distributed.run`), or None if it is something else."""
    name = Path(command[0]).name
    arguments = command[1:]
    if name.startswith("python"):
        while arguments and arguments[0] in ("-u", "-B", "-O"):
            arguments = arguments[1:]
        if arguments[:1] != ["-m"] or len(arguments) < 2:
            return None
        name, arguments = arguments[1], arguments[2:]
    if name in ("torchrun", "torch.distributed.run"):
        from torch.distributed.run import parse_args

        return parse_args(arguments)
    if name == "torch.distributed.launch":
        from torch.distributed.launch import parse_args as parse_launch_args

        return parse_launch_args(arguments)
    return None


def world_of(args: Namespace, gpus: int | None) -> World:
    """How many nodes and ranks torchrun was asked for. `gpus` of a node stand for 'gpu' and 'auto'."""
    from torch.distributed.run import parse_min_max_nnodes

    try:
        _, nodes = parse_min_max_nnodes(args.nnodes)
    except (RuntimeError, ValueError) as error:
        raise MayaError(f"--nnodes {args.nnodes}: {error}.", "Give a number, or MIN:MAX.") from error
    wanted = str(args.nproc_per_node)
    if wanted in ("gpu", "auto"):
        if gpus is None:
            raise MayaError(
                f"--nproc-per-node {wanted}: how many GPUs has a node?",
                "Say it to Maya: maya run --gpus-per-node 8 -- ...",
            )
        return World(nodes, gpus)
    if wanted == "cpu":
        return World(nodes, os.cpu_count() or 1)
    if not wanted.isdigit() or int(wanted) < 1 or nodes < 1:
        raise MayaError(
            f"torchrun --nnodes {args.nnodes} --nproc-per-node {wanted} is no world.", "Both must be at least 1."
        )
    return World(nodes, int(wanted))


def program_of(args: Namespace, local_rank: int) -> list[str]:
    """The command a rank runs."""
    from torch.distributed.run import get_use_env

    if args.no_python:
        program = shutil.which(args.training_script)
        if program is None:
            raise MayaError(f"command not found: '{args.training_script}'.", "torchrun --no-python needs a program.")
        command = [program]
    else:
        if not args.module and not Path(args.training_script).exists():
            raise MayaError(f"no such script: {args.training_script}.", "Give torchrun the path of your program.")
        command = [
            os.getenv("PYTHON_EXEC", sys.executable),
            "-u",
            *(["-m"] if args.module else []),
            args.training_script,
        ]
    return [*command, *([] if get_use_env(args) else [f"--local-rank={local_rank}"]), *args.training_script_args]


def rank_environment(args: Namespace, world: World, rank: int) -> dict[str, str]:
    """What torchrun's agent sets for a worker, given these arguments."""
    endpoint = (args.rdzv_endpoint or "").split(":")[0]
    address = "localhost" if args.standalone else endpoint or args.master_addr or "127.0.0.1"
    return {
        **world.environment(rank, address, args.master_port or 29500),
        "ROLE_NAME": args.role,
        "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
        "TORCHELASTIC_RUN_ID": args.rdzv_id,
    }


def launch(args: Namespace, link: Link, settings: ProcessSettings, within: RankSetting | None = None) -> int:
    """Runs the ranks of a torchrun command. The exit code of the first that failed, or 0."""
    within = within or RankSetting()
    world = world_of(args, settings.gpus)
    program_of(args, 0)  # a wrong one is said now

    def start(rank: int) -> RankProcess:
        # A progress bar shares the terminal with rank 0's output, so both must come from here.
        apart = rank != 0 or sys.stderr.isatty()
        program = program_of(args, rank % world.ranks_per_node)
        environment = {**within.environment, **rank_environment(args, world, rank)}
        # The first rank of a job runs while the process that the others are forked from starts.
        warm = within.fork_server or (fork_server if rank else None)
        return start_rank(program, settings, world, rank, environment, apart, within.output, warm)

    link.idle(True)
    with ForkServer() as fork_server:
        return run_ranks(link, world.size, start)
