"""Runs the user's command with the emulation switched on, and reads back what it did."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from maya_core.device.build import library
from maya_core.device.visible import VARIABLE as VISIBLE
from maya_core.errors import MayaError
from maya_core.installation import how_to_install, installation, version_of
from maya_core.launch import launchers, torchrun
from maya_core.launch.bounds import needs_bounds, run_bounds
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.link import Link
from maya_core.launch.progress import JobProgress
from maya_core.launch.ranks import RankLauncher, RankProcess, RankSetting
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.launch.signals import ended_by_signal
from maya_core.launch.world import World
from maya_core.overlay import files
from maya_core.overlay.files import Written
from maya_core.request import Request
from maya_core.torch_seam.version import installed
from maya_core.trace.job import JobTrace, collate, gave_up, read_traces, write_manifest
from maya_core.trace.unknown_read import Extreme


@dataclass(frozen=True)
class CompletedRun:
    """What a command did on the emulated GPUs."""

    exit_code: int
    job: JobTrace | None  # None: it left no trace
    files: list[Written]  # that the program wrote; they are not where it wrote them


@dataclass(frozen=True)
class PlannedRun:
    """A command that can be run: the program was found, and its world is one that can be emulated."""

    command: list[str]
    request: Request
    world: World
    ranks: tuple[int, ...]  # that the user asked for by number
    torchrun: Namespace | None  # its arguments, if the command is torchrun
    program: str  # the path of the command

    def run(self, folder: Path, setting: RankSetting | None = None) -> CompletedRun:
        """Runs the command to its end, or to the end of its last emulated step. The traces go into the folder; `setting` is for a job that is
        one of many."""
        library()  # compiled here, once, where its message is seen
        done = self._once(folder, setting)
        job = done.job
        if job is not None:
            if needs_bounds(job):
                job = replace(job, bounds=run_bounds(folder, setting, self._once))
            write_manifest(folder, job)
        return replace(done, job=job)

    def _once(self, folder: Path, setting: RankSetting | None, unknown: Extreme | None = None) -> CompletedRun:
        request = self.request
        folder.mkdir(parents=True, exist_ok=True)
        with (
            ended_by_signal(),
            JobProgress(request.steps) as progress,
            Coordinator(self.ranks, progress.step) as coordinator,
        ):
            settings = ProcessSettings(
                request=request.model_copy(update={"gpu": request.gpu_name, "tracking": {}}),
                folder=folder.resolve(),
                gpus=request.gpus_per_node,
                machine_visible=os.environ.get(VISIBLE),
                rank=None,
                chosen=self.ranks,
                coordinator=coordinator.socket,
                note_files=setting is not None,
                unknown=unknown,
            )
            overlay = coordinator.socket.parent / "overlay"
            setting = (setting or RankSetting()).with_environment(
                files.environment(overlay, [folder, coordinator.socket.parent])
            )
            if self.torchrun is not None:
                launcher = RankLauncher(Link(coordinator.socket, frozenset(self.ranks)), settings)
                exit_code = torchrun.launch(self.torchrun, launcher, setting)
            else:
                exit_code = _run_program([self.program, *self.command[1:]], settings, setting)
            wrote = files.written(overlay)
            if request.keep_files and unknown is None:
                files.keep(overlay, folder / files.KEPT)
        job = collect(folder, self.world, exit_code, coordinator.failed)
        if job is not None:
            job = replace(job, command=without_secrets(self.command), node=request.node, network=request.network)
        return CompletedRun(exit_code, job, wrote)


def plan_run(command: list[str], request: Request, check: Callable[[World], object] = lambda _: None) -> PlannedRun:
    """What running the command means. A mistake is reported here, before anything is written or started; `check` may refuse the job's world."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise MayaError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: torch would not load the emulated device.",
            "Unset it and run again.",
        )
    installed().check()  # before torchrun's parser, which is torch's own
    nodes, gpus = request.nodes, request.gpus_per_node
    starts_ranks = nodes is None or launchers.launcher_in(command) is not None
    args = torchrun.parse(command if starts_ranks else _as_torchrun(command, nodes or 1, gpus or 1))
    program = find_program(command[0])
    if args is None and program is None:
        raise command_not_found(command[0])
    world = torchrun.world_of(args, gpus) if args is not None else World(nodes or 1, gpus or 1)
    planned = PlannedRun(command, request, world, _chosen_ranks(request, world), args, program or command[0])
    check(world)
    return planned


def _chosen_ranks(request: Request, world: World) -> tuple[int, ...]:
    chosen = tuple(range(world.size)) if request.ranks is None else request.ranks
    if wrong := [rank for rank in chosen if rank >= world.size]:
        raise MayaError(
            f"--ranks {wrong[0]}: the world has {world.size} ranks, 0 to {world.size - 1}.",
            "Ranks are counted over all nodes.",
        )
    return chosen


def find_program(name: str) -> str | None:
    """The path of a command. A console script of this environment is found even if the environment is not activated."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def command_not_found(name: str) -> MayaError:
    """The error for a command that does not exist. Launchers have the names of their packages: deepspeed, accelerate."""
    advice = "Give the command as you would type it, after `--`: maya run -- python train.py"
    if installation().extra_of(name) is not None and version_of(name) is None:
        advice = f"{name} is not installed in the environment of `maya`. Run: {how_to_install(packages=[name])}"
    return MayaError(f"command not found: '{name}'.", advice)


def _as_torchrun(command: list[str], nodes: int, gpus: int) -> list[str]:
    """A cluster that was given to Maya itself: its ranks run the command as if torchrun had started them."""
    args = torchrun.parse(command)
    if args is None:
        return ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={gpus}", "--no-python", *command]
    if torchrun.world_of(args, gpus).nodes != nodes:
        raise MayaError(
            f"--nodes {nodes} for Maya, --nnodes {args.nnodes} for torchrun.",
            "Give only one of them, or make them the same.",
        )
    return command


def _run_program(command: list[str], settings: ProcessSettings, setting: RankSetting) -> int:
    """Runs a command that is one process, or starts its ranks itself."""
    environment = {**setting.environment, VARIABLE: settings.model_dump_json()}
    child: RankProcess | None = None
    out, err = setting.output or (None, None)
    if setting.fork_server is not None and out is not None and err is not None:
        child = setting.fork_server.start(command, environment, (out.fileno(), err.fileno()))
    if child is None:
        child = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=err)
    try:
        exit_code = child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        exit_code = child.wait()
    return exit_code if exit_code >= 0 else 128 - exit_code


def collect(
    folder: Path, world: World, exit_code: int, failed: Mapping[int, int] = MappingProxyType({})
) -> JobTrace | None:
    """The traces of a run that has ended. `failed` has the exit codes of ranks that ended with one."""
    traces = gave_up(read_traces(folder), exit_code, failed)
    if not traces:
        return None
    joined = max(trace.meta["world_size"] for trace in traces)
    # A single process sees the GPUs that it, or CUDA_VISIBLE_DEVICES, asks for.
    world_size = joined if joined > 1 else max(world.size, *(trace.meta["gpus"] for trace in traces))
    per_node = min(world_size, max(trace.meta["ranks_per_node" if joined > 1 else "gpus"] for trace in traces))
    return replace(
        collate(traces),
        world_size=world_size,
        nodes=-(-world_size // per_node),
        gpus_per_node=per_node,
        exit_code=exit_code,
        failed=dict(failed),
    )


# Names of options that take a secret, and patterns of well-known secrets.
_SECRET_NAME = re.compile(r"(key|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
_SECRET_LOOKS = re.compile(
    r"(?<![\w-])(sk-|hf_|ghp_|gho_|glpat-|xox[abp]-)(?=\w*\d)[\w-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|(?<=://)[^/@\s]+:[^/@\s]+(?=@)"
)


def without_secrets(command: list[str]) -> tuple[str, ...]:
    """The command as it may be stored and shown."""
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


def split_command(arguments: list[str]) -> list[str]:
    """The command after `--`, with the running Python in place of a bare 'python'."""
    if not arguments:
        raise MayaError("no command to run.", "Give it after `--`: maya run --gpu h100 -- python train.py")
    if arguments[0] in ("python", "python3"):
        return [sys.executable, *arguments[1:]]
    if arguments[0].endswith(".py"):
        return [sys.executable, *arguments]
    return arguments
