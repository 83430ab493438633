"""`accelerate launch` under `maya run`: the cluster it is told of is the emulated one. Its launchers for several processes end in
torch.distributed.run, which the core takes over; here is what is left: how many GPUs it sees, the launcher of a single process,
and DeepSpeed's, which would go to other machines."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.launch.settings import VARIABLE
from maya_core.session.emulation import Emulation


def install(emulation: Emulation) -> None:
    if emulation.link is None:  # emulated inside a program, which launches nothing
        return
    patches = emulation.device.patches
    patches.when_imported("accelerate.commands.launch", functools.partial(_take_over, emulation))
    # Nothing listens on a port: one that is busy keeps nobody from emulating.
    patches.when_imported(
        "accelerate.utils.launch", lambda module: patches.set(module, "is_port_in_use", lambda port=None: False)
    )


def _take_over(emulation: Emulation, launch: ModuleType) -> None:
    patches = emulation.device.patches
    patches.set(launch, "_validate_launch_command", _with_cluster(launch._validate_launch_command, emulation))
    patches.set(launch, "prepare_simple_launcher_cmd_env", _emulated(launch.prepare_simple_launcher_cmd_env, emulation))
    patches.set(launch, "deepspeed_launcher", _from_here(launch.deepspeed_launcher))


def _with_cluster(original: Callable[..., Any], emulation: Emulation) -> Callable[..., Any]:
    settings = emulation.settings

    @functools.wraps(original)
    def validate(args: Namespace) -> Any:
        if settings.nodes is not None and args.num_machines is None:
            args.num_machines = settings.nodes
            args.num_processes = args.num_processes or settings.nodes * (settings.gpus or 1)
        if args.num_machines is not None and args.num_machines > 1:  # any address: nobody goes there
            args.machine_rank = args.machine_rank or 0
            args.main_process_ip = args.main_process_ip or "127.0.0.1"
        if args.num_processes:  # so many GPUs there must be, or accelerate would start one process
            emulation.grow(-(-args.num_processes // (args.num_machines or 1)))
        return original(args)

    return validate


def _emulated(original: Callable[..., Any], emulation: Emulation) -> Callable[..., Any]:
    """The only child of `simple_launcher`: emulated as this process is, on one GPU, for one process was asked for."""
    child = emulation.settings.model_copy(update={"rank": None, "gpus": 1})

    @functools.wraps(original)
    def prepare(args: Namespace) -> tuple[list[str], dict[str, str]]:
        command, environment = original(args)
        if emulation.link is not None:
            emulation.link.idle(True)  # this process only waits from here on
        return command, {**environment, VARIABLE: child.model_dump_json()}

    return prepare


def _from_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's own multi-node launchers (pdsh, mpirun) need the other machines. The ranks they start are torchrun's."""

    @functools.wraps(original)
    def deepspeed_launcher(args: Namespace) -> Any:
        args.deepspeed_multinode_launcher = "standard"
        return original(args)

    return deepspeed_launcher
