"""torchrun: its own parser reads its command line, and its ranks run in the emulated world. torch is imported only
where torchrun is called, because other commands start without it."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from maya_core.errors import MayaError
from maya_core.launch.ranks import RankLauncher, RankSetting
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

        found: Namespace = parse_args(arguments)  # type: ignore[no-untyped-call]
        return found
    if name == "torch.distributed.launch":
        from torch.distributed.launch import parse_args as parse_launch_args

        launched: Namespace = parse_launch_args(arguments)  # type: ignore[no-untyped-call]
        return launched
    return None


def world_of(args: Namespace, gpus: int | None) -> World:
    """The nodes and ranks that torchrun was asked for. `gpus` is the number of GPUs of a node, for 'gpu' and 'auto'."""
    from torch.distributed.run import parse_min_max_nnodes

    try:
        _, nodes = parse_min_max_nnodes(args.nnodes)
    except (RuntimeError, ValueError) as error:
        raise MayaError(f"--nnodes {args.nnodes}: {error}.", "Give a number, or MIN:MAX.") from error
    wanted = str(args.nproc_per_node)
    if wanted in ("gpu", "auto"):
        if gpus is None:
            raise MayaError(
                f"--nproc-per-node {wanted}: Maya does not know how many GPUs a node has.",
                "Give the number to Maya: maya run --gpus-per-node 8 -- ...",
            )
        return World(nodes, gpus)
    if wanted == "cpu":
        return World(nodes, os.cpu_count() or 1)
    if not wanted.isdigit() or int(wanted) < 1 or nodes < 1:
        raise MayaError(
            f"torchrun --nnodes {args.nnodes} --nproc-per-node {wanted} asks for no ranks.",
            "Both numbers must be at least 1.",
        )
    return World(nodes, int(wanted))


def program_of(args: Namespace, local_rank: int) -> list[str]:
    """The command that a rank runs."""
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
    """The variables that torchrun's agent sets for a worker, given these arguments."""
    endpoint = (args.rdzv_endpoint or "").split(":")[0]
    address = "localhost" if args.standalone else endpoint or args.master_addr or "127.0.0.1"
    return {
        **world.environment(rank, address, args.master_port or 29500),
        "ROLE_NAME": args.role,
        "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
        "TORCHELASTIC_RUN_ID": args.rdzv_id,
    }


def launch(args: Namespace, launcher: RankLauncher, setting: RankSetting | None = None) -> int:
    """Runs the ranks of a torchrun command. The exit code of the first that failed, or 0."""
    world = world_of(args, launcher.settings.gpus)
    return launcher.run(
        world,
        lambda rank: program_of(args, rank % world.ranks_per_node),
        lambda rank: rank_environment(args, world, rank),
        setting,
    )
