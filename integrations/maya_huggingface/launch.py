"""Supports `accelerate launch` under `maya run`. Its launchers for several processes call torch.distributed.run, which the core
handles. This module handles the rest: the number of GPUs that it sees, the launcher of a single process, and DeepSpeed's launcher,
which would connect to other machines."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    if integration.launcher is None:  # the emulation runs inside a program, which launches nothing
        return
    patches = integration.patches
    patches.when_imported("accelerate.commands.launch", functools.partial(_take_over, integration))
    # No port is used under emulation, so a busy one does not matter.
    patches.when_imported(
        "accelerate.utils.launch", lambda module: patches.set(module, "is_port_in_use", lambda port=None: False)
    )


def _take_over(integration: Integration, launch: ModuleType) -> None:
    patches = integration.patches
    patches.set(launch, "_validate_launch_command", _with_cluster(launch._validate_launch_command, integration))
    patches.set(
        launch, "prepare_simple_launcher_cmd_env", _emulated(launch.prepare_simple_launcher_cmd_env, integration)
    )
    patches.set(launch, "deepspeed_launcher", _without_other_machines(launch.deepspeed_launcher))


def _with_cluster(original: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate(args: Namespace) -> Any:
        nodes = integration.request.nodes
        if nodes is not None and args.num_machines is None:
            args.num_machines = nodes
            args.num_processes = args.num_processes or nodes * (integration.given_gpus or 1)
        if (
            args.num_machines is not None and args.num_machines > 1
        ):  # any address will do, because nothing connects to it
            args.machine_rank = args.machine_rank or 0
            args.main_process_ip = args.main_process_ip or "127.0.0.1"
        if args.num_processes:  # with fewer GPUs, accelerate would start only one process
            integration.grow(-(-args.num_processes // (args.num_machines or 1)))
        return original(args)

    return validate


def _emulated(original: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
    """Adds the environment of an emulated rank to the only child of `simple_launcher`."""

    @functools.wraps(original)
    def prepare(args: Namespace) -> tuple[list[str], dict[str, str]]:
        command, environment = original(args)
        assert integration.launcher is not None
        return command, {**environment, **integration.launcher.only_child()}

    return prepare


def _without_other_machines(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces DeepSpeed's multi-node launchers (pdsh, mpirun), which need other machines. They start the same ranks as torchrun."""

    @functools.wraps(original)
    def deepspeed_launcher(args: Namespace) -> Any:
        args.deepspeed_multinode_launcher = "standard"
        return original(args)

    return deepspeed_launcher
