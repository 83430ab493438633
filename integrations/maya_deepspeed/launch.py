"""Supports the `deepspeed` command under `maya run`. DeepSpeed's own parser reads the arguments, the hosts become the nodes of the
emulated cluster, and the ranks run on this machine. Other machines are not used and need not exist."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from maya_core.errors import MayaError
from maya_core.hardware.catalog import default_node, find_gpu
from maya_core.integration import Integration, RankLauncher
from maya_core.messages import say
from maya_core.request import Request
from maya_deepspeed.job import Hosts, run_job, world_of


def install(integration: Integration) -> None:
    launcher, patches = integration.launcher, integration.patches
    if launcher is None:  # the emulation runs inside a program, which launches nothing
        return
    patches.when_imported(
        "deepspeed.launcher.runner", lambda runner: patches.set(runner, "main", _main(launcher, runner))
    )


def _main(launcher: RankLauncher, runner: ModuleType) -> Callable[..., None]:
    @functools.wraps(runner.main)
    def main(args: list[str] | None = None) -> None:
        parsed = runner.parse_args(args)
        if hasattr(runner, "set_log_level_from_string"):  # not in DeepSpeed 0.17.0 and before
            runner.set_log_level_from_string("error" if parsed.quiet else parsed.log_level)
        try:
            code = launch(launcher, runner, parsed)
        except MayaError as error:
            say(str(error))
            code = 2
        if code:
            sys.exit(code)

    return main


def launch(launcher: RankLauncher, runner: ModuleType, args: Namespace) -> int:
    """Runs a `deepspeed` command. Returns the exit code of the first rank that failed, or 0."""
    _check(args)
    hosts = hosts_of(launcher.settings.request, runner, args)
    world_of(hosts)  # reports a wrong world before anything starts
    if args.autotuning:
        from maya_deepspeed.autotuning import tune

        return tune(launcher, runner, args, hosts)
    return run_job(launcher, runner, args, hosts)


def _check(args: Namespace) -> None:
    if args.module and args.no_python:
        raise MayaError("--no_python and --module do not work together.", "Remove one of them: a module needs Python.")
    if not args.module and not args.no_python and not Path(args.user_script).exists():
        raise MayaError(f"the script {args.user_script} does not exist.", "Give deepspeed the path of your program.")
    if args.no_python and shutil.which(args.user_script) is None:
        raise MayaError(f"command not found: '{args.user_script}'.", "deepspeed --no_python needs a program.")
    if args.enable_each_rank_log != "None":
        say(
            "--enable_each_rank_log: under emulation no log files are written; the output of the emulated ranks appears here"
        )


def hosts_of(request: Request, runner: ModuleType, args: Namespace) -> Hosts:
    """The hosts and their GPUs, by DeepSpeed's own rules. Instead of this machine's GPUs the emulated ones are counted, and without a
    hostfile there are as many nodes as requested."""
    filtered = bool(args.include or args.exclude)
    if filtered and (args.num_nodes >= 0 or args.num_gpus >= 0):
        raise MayaError(
            "--num_nodes and --num_gpus do not work together with --include and --exclude.", "Remove one of them."
        )
    try:
        pool = runner.fetch_hostfile(args.hostfile)
        if pool is None:
            pool = _without_hostfile(request, runner, args)
        hosts = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
        hosts = _first(hosts, args.num_nodes, args.num_gpus)
        launchers = _launchers(runner)
        if args.launcher.lower() not in launchers:
            raise ValueError(f"unknown launcher {args.launcher}; the known ones are {', '.join(launchers)}")
        launcher = launchers[args.launcher.lower()]
        if launcher is not None:
            launcher.validate_active_resources(hosts)
    except ValueError as error:  # DeepSpeed's own message about the hostfile or a filter
        raise MayaError(f"deepspeed: {error}.", "Nothing was started.") from error
    nodes = request.nodes
    if nodes is not None and nodes != len(hosts):
        raise MayaError(
            f"Maya was given --nodes {nodes}, but deepspeed uses {len(hosts)}.",
            "Remove one of them, or give the same number.",
        )
    return dict(hosts)


def _first(hosts: Hosts, nodes: int, gpus: int) -> Hosts:
    """The first hosts, and the first GPUs of each, if so many were requested."""
    names = list(hosts)[: nodes if nodes > 0 else None]
    return {name: list(range(gpus)) if gpus > 0 else hosts[name] for name in names}


def _launchers(runner: ModuleType) -> dict[str, Any]:
    """DeepSpeed's launchers by name, with the class that checks the hosts; before DeepSpeed 0.19, none did."""
    if hasattr(runner, "LAUNCHER_CLASSES"):
        classes: dict[str, Any] = runner.LAUNCHER_CLASSES
        return classes
    return {value: None for name, value in vars(runner).items() if name.endswith("_LAUNCHER")}


def _without_hostfile(request: Request, runner: ModuleType, args: Namespace) -> dict[str, int]:
    """The number of GPUs of each host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and not (args.include or args.exclude or args.num_nodes > 1 or args.num_gpus > 0):
        args.include = f"localhost:{visible}"
    nodes = max(args.num_nodes, request.nodes or 1)
    named = [slot for slots in runner.parse_node_config_list(args.include).values() for slot in slots]
    gpus = request.gpus_per_node or max(args.num_gpus, 0) or (max(named) + 1 if named else 0)
    if not gpus:
        node = default_node(find_gpu(request.gpu_name))
        gpus = node.gpus_per_node
        say(f"neither --num_gpus nor a hostfile was given: using all {gpus} GPUs of a node ({node.name})")
    names = ["localhost"] if nodes == 1 else [f"worker-{node}" for node in range(nodes)]
    return dict.fromkeys(names, gpus)
