"""`accelerate launch` under `maya run`: the cluster it is told of is the emulated one. Its launchers for several processes end in
torch.distributed.run, which the core takes over; here is what is left: how many GPUs it sees, the launcher of a single process,
and DeepSpeed's, which would go to other machines."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    if integration.launcher is None:  # emulated inside a program, which launches nothing
        return
    patches = integration.patches
    patches.when_imported("accelerate.commands.launch", functools.partial(_take_over, integration))
    # Nothing listens on a port: one that is busy keeps nobody from emulating.
    patches.when_imported(
        "accelerate.utils.launch", lambda module: patches.set(module, "is_port_in_use", lambda port=None: False)
    )


def _take_over(integration: Integration, launch: ModuleType) -> None:
    patches = integration.patches
    patches.set(launch, "_validate_launch_command", _with_cluster(launch._validate_launch_command, integration))
    patches.set(
        launch, "prepare_simple_launcher_cmd_env", _emulated(launch.prepare_simple_launcher_cmd_env, integration)
    )
    patches.set(launch, "deepspeed_launcher", _from_here(launch.deepspeed_launcher))


def _with_cluster(original: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate(args: Namespace) -> Any:
        nodes = integration.request.nodes
        if nodes is not None and args.num_machines is None:
            args.num_machines = nodes
            args.num_processes = args.num_processes or nodes * (integration.given_gpus or 1)
        if args.num_machines is not None and args.num_machines > 1:  # any address: nothing connects to it
            args.machine_rank = args.machine_rank or 0
            args.main_process_ip = args.main_process_ip or "127.0.0.1"
        if args.num_processes:  # without as many GPUs, accelerate would start one process
            integration.grow(-(-args.num_processes // (args.num_machines or 1)))
        return original(args)

    return validate


def _emulated(original: Callable[..., Any], integration: Integration) -> Callable[..., Any]:
    """The only child of `simple_launcher`."""

    @functools.wraps(original)
    def prepare(args: Namespace) -> tuple[list[str], dict[str, str]]:
        command, environment = original(args)
        assert integration.launcher is not None
        return command, {**environment, **integration.launcher.only_child()}

    return prepare


def _from_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's own multi-node launchers (pdsh, mpirun) need the other machines. The ranks they start are torchrun's."""

    @functools.wraps(original)
    def deepspeed_launcher(args: Namespace) -> Any:
        args.deepspeed_multinode_launcher = "standard"
        return original(args)

    return deepspeed_launcher
