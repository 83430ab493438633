"""`maya run`: starts the user's command with the emulation switched on and reads back what it did."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from maya_core.device.build import library
from maya_core.errors import MayaError
from maya_core.launch import torchrun
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.link import Link
from maya_core.launch.progress import JobProgress
from maya_core.launch.ranks import RankProcess, RankSetting
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.launch.signals import ended_by_signal
from maya_core.launch.world import World
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION
from maya_core.report.files import is_made
from maya_core.trace.job import JobTrace, collate, gave_up, read_traces, write_manifest


@dataclass(frozen=True)
class CompletedRun:
    """What a command did on the emulated GPUs."""

    exit_code: int
    job: JobTrace | None  # None: it left no trace
    out: Path


def run_command(
    command: list[str],
    *,
    gpu: str,
    nodes: int | None,
    gpus: int | None,
    steps: int | None,
    ranks: tuple[int, ...] | None,
    out: Path,
    node: str | None = None,
    network: str | None = None,
    attention: str = DEFAULT_ATTENTION,
    host: str = "modelled",
    check: Callable[[World], object] = lambda _: None,
    within: RankSetting | None = None,
) -> CompletedRun:
    """Runs the command to its end, or to the end of its last emulated step. `ranks`: () for those needed, None for all.
    `node` and `network` are noted for the prediction, and told with `attention` and `host` to programs that make predictions themselves;
    `check` may refuse its world before anything is run. `within` says how a job that is one of many is run."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise MayaError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: torch would not load the emulated device.",
            "Unset it and run again.",
        )
    starts_ranks = nodes is None or launcher_in(command) is not None
    args = torchrun.parse(command if starts_ranks else _as_torchrun(command, nodes or 1, gpus or 1))
    program = find_program(command[0])
    if args is None and program is None:
        raise MayaError(
            f"command not found: '{command[0]}'.",
            "Give the command as you would type it, after `--`: maya run -- python train.py",
        )
    world = torchrun.world_of(args, gpus) if args is not None else World(nodes or 1, gpus or 1)
    chosen = tuple(range(world.size)) if ranks is None else ranks
    if wrong := [rank for rank in chosen if rank >= world.size]:
        raise MayaError(
            f"--ranks {wrong[0]}: the world has {world.size} ranks, 0 to {world.size - 1}.",
            "Ranks are counted over all nodes.",
        )
    check(world)
    check_out(out)
    library()  # compile here, once, where its message is seen
    out.mkdir(parents=True, exist_ok=True)
    with ended_by_signal(), JobProgress(steps) as progress, Coordinator(chosen, progress.step) as coordinator:
        settings = ProcessSettings(
            gpu=gpu,
            gpus=gpus,
            nodes=nodes,
            steps=steps,
            out=out.resolve(),
            rank=None,
            chosen=chosen,
            coordinator=coordinator.socket,
            note_files=within is not None,
            node=node,
            network=network,
            attention=attention,
            host=host,
        )
        if args is not None:
            exit_code = torchrun.launch(args, Link(coordinator.socket, frozenset(chosen)), settings, within)
        else:
            exit_code = _run_program([program or command[0], *command[1:]], settings, within or RankSetting())
    job = collect(out, world, exit_code)
    if job is not None:
        job = replace(job, command=without_secrets(command), node=node, network=network)
        write_manifest(out, job)
    return CompletedRun(exit_code, job, out)


# Launchers whose integration tells them of the cluster (ProcessSettings.nodes): as many of them as ranks would be too many.
LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "deepspeed")


def launcher_in(command: list[str]) -> str | None:
    """Which of the launchers a command calls: itself, or by Python."""
    words = command
    if Path(words[0]).name.startswith("python"):
        words = [word for word in words[1:4] if word not in ("-u", "-B", "-O", "-m")]
    name = Path(words[0]).name if words else ""
    return name if name in LAUNCHERS else None


def find_program(name: str) -> str | None:
    """Where the command is; a console script of this very environment is found even if that is not activated."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _as_torchrun(command: list[str], nodes: int, gpus: int) -> list[str]:
    """A cluster given to Maya itself: its ranks run the command as if torchrun had started them."""
    args = torchrun.parse(command)
    if args is None:
        return ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={gpus}", "--no-python", *command]
    if torchrun.world_of(args, gpus).nodes != nodes:
        raise MayaError(
            f"--nodes {nodes} for Maya, --nnodes {args.nnodes} for torchrun.", "Leave one out, or make them the same."
        )
    return command


def _run_program(command: list[str], settings: ProcessSettings, within: RankSetting) -> int:
    """Runs a command that is one process, or starts its ranks itself."""
    environment = {**within.environment, VARIABLE: settings.model_dump_json()}
    child: RankProcess | None = None
    out, err = within.output or (None, None)
    if within.fork_server is not None and out is not None and err is not None:
        child = within.fork_server.start(command, environment, (out.fileno(), err.fileno()))
    if child is None:
        child = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=err)
    try:
        exit_code = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        exit_code = child.wait()
    return exit_code if exit_code >= 0 else 128 - exit_code


def collect(out: Path, world: World, exit_code: int) -> JobTrace | None:
    """The traces of a run that has come to its end."""
    traces = gave_up(read_traces(out), exit_code)
    if not traces:
        return None
    joined = max(trace.meta["world_size"] for trace in traces)
    world_size = joined if joined > 1 else world.size
    per_node = min(world_size, max(trace.meta["ranks_per_node" if joined > 1 else "gpus"] for trace in traces))
    return replace(
        collate(traces),
        world_size=world_size,
        nodes=-(-world_size // per_node),
        gpus_per_node=per_node,
        exit_code=exit_code,
    )


# Names of options that take a secret, and secrets that can be told by their looks.
_SECRET_NAME = re.compile(r"(key|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
_SECRET_LOOKS = re.compile(
    r"(?<![\w-])(sk-|hf_|ghp_|gho_|glpat-|xox[abp]-)(?=\w*\d)[\w-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|(?<=://)[^/@\s]+:[^/@\s]+(?=@)"
)


def without_secrets(command: list[str]) -> tuple[str, ...]:
    """The command as it may be kept and shown."""
    shown, hide = [], False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            word = "***"
        elif equals and _SECRET_NAME.search(name):
            word = f"{name}=***"
        hide = not equals and word.startswith("-") and bool(_SECRET_NAME.search(name))
        shown.append(_SECRET_LOOKS.sub("***", word))
    return tuple(shown)


def check_out(out: Path) -> None:
    """An earlier run's folder is replaced, anything else of the user's never."""
    if not out.exists():
        return
    if not out.is_dir():
        raise MayaError(f"--out {out} is a file.", "Give a folder for the traces.")
    run = r"(rank-\d{5,}\.trace|job\.json|prediction\.json)(\.part)?"
    earlier = [entry for entry in out.iterdir() if re.fullmatch(run, entry.name)]
    others = [entry for entry in out.iterdir() if entry not in earlier and not is_made(entry)]
    if others:
        raise MayaError(
            f"--out {out} holds other files ({others[0].name}).",
            "Give an empty or new folder: traces are not mixed with them.",
        )
    for entry in earlier:
        entry.unlink()


def split_command(arguments: list[str]) -> list[str]:
    """The command after `--`, with the running Python in place of a bare 'python'."""
    if not arguments:
        raise MayaError("no command to run.", "Give it after `--`: maya run --gpu h100 -- python train.py")
    if arguments[0] in ("python", "python3"):
        return [sys.executable, *arguments[1:]]
    if arguments[0].endswith(".py"):
        return [sys.executable, *arguments]
    return arguments
