"""Patches the place where a Trainer or a Fabric turns its arguments into an accelerator, devices and ranks, so that the world that it
requests becomes the emulated one."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from maya_core.errors import MayaError
from maya_core.integration import Integration, World
from maya_core.messages import say
from maya_lightning.plugin import MayaEmulator

OTHER_STARTS = ("_spawn", "_fork", "_notebook")  # strategies that start processes; under emulation Maya starts them


def install(integration: Integration, name: str, module: ModuleType) -> None:
    connector = getattr(module, name)
    original = connector.__init__
    patches = integration.patches

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, *args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        emulator = _emulator_in(arguments["plugins"])
        try:
            if emulator is None and not _wants_gpu(arguments["accelerator"]):
                return original(self, *args, **kwargs)  # a training on the CPU besides the emulated one
            if emulator is not None:
                _check(arguments)
            _take_place(integration, emulator, arguments)
            original(*given.args, **given.kwargs)
        except BaseException:
            if emulator is not None:
                emulator.session.drop()
            raise

    patches.set(connector, "__init__", __init__)
    # Lightning refuses these strategies in notebooks. Under emulation no processes need to be started.
    patches.set(module, "_IS_INTERACTIVE", False)


def install_command(integration: Integration, module: ModuleType) -> None:
    """Patches `fabric run`, which counts GPUs and leaves the rest to torchrun."""
    original = module._get_num_processes

    @functools.wraps(original)
    def get_num_processes(accelerator: str, devices: str) -> int:
        if _wants_gpu(accelerator or "auto") and integration.given_gpus is None:
            integration.grow(_gpus(devices, integration.gpus)[0])
        return int(original(accelerator, devices))

    integration.patches.set(module, "_get_num_processes", get_num_processes)


def _emulator_in(plugins: Any) -> MayaEmulator | None:
    found = [one for one in (plugins if isinstance(plugins, Iterable) else [plugins]) if isinstance(one, MayaEmulator)]
    if len(found) > 1:
        for one in found:
            one.session.drop()
        raise MayaError(
            "there are two MayaEmulators among the plugins.", "Give only one: a job runs on one kind of GPU."
        )
    return found[0] if found else None


def _wants_gpu(accelerator: Any) -> bool:
    return accelerator in ("auto", "gpu", "cuda") or type(accelerator).__name__ == "CUDAAccelerator"


def _check(arguments: dict[str, Any]) -> None:
    """Rejects arguments that do not work together with the plugin."""
    if not _wants_gpu(arguments["accelerator"]):
        raise MayaError(
            f"accelerator={arguments['accelerator']!r} does not work together with MayaEmulator, which emulates GPUs.",
            "Remove `accelerator`, or remove the plugin to train on the CPU.",
        )
    strategy = arguments["strategy"]
    carried = getattr(strategy, "cluster_environment", None)
    if carried is not None and not isinstance(carried, MayaEmulator):
        raise MayaError(
            f"{type(strategy).__name__} already has a cluster environment, {type(carried).__name__}.",
            "Create the strategy without `cluster_environment`: MayaEmulator is one.",
        )


def _take_place(integration: Integration, emulator: MayaEmulator | None, arguments: dict[str, Any]) -> None:
    """Decides the world and the rank of this process. Options of `maya run` come first, then the plugin, then the Trainer."""
    arguments["strategy"] = _without_process_start(arguments["strategy"])
    needed, ranks = _gpus(arguments["devices"], integration.gpus)
    if emulator is not None and emulator.request.gpus_per_node:
        by_command = None if emulator.session.on else integration.given_gpus
        needed = ranks = by_command or emulator.request.gpus_per_node
    by_command_nodes = None if emulator is not None and emulator.session.on else integration.request.nodes
    nodes = by_command_nodes or (emulator.request.nodes if emulator is not None else None) or arguments["num_nodes"]
    world = World(nodes, ranks)
    if emulator is not None:
        emulator.world = world
        _announce(integration, emulator, arguments)
        if emulator.request.gpus_per_node:
            arguments["devices"] = ranks
    arguments["num_nodes"] = nodes
    if "RANK" in os.environ:  # started by a launcher; Lightning itself checks that the settings agree
        return
    if integration.given_gpus is None or (emulator is not None and emulator.session.on):
        integration.grow(needed)
    integration.become_world(world)


def _announce(integration: Integration, emulator: MayaEmulator, arguments: dict[str, Any]) -> None:
    world, request = emulator.world, emulator.request
    if world is None or integration.rank not in (None, 0):
        return
    cluster = f"{world.nodes} node{'s' * (world.nodes > 1)} of {world.ranks_per_node} x {integration.gpu.name}"
    default = "" if request.gpu or request.node or not emulator.session.on else ", the default GPU"
    by_trainer = f", as requested by devices={arguments['devices']!r} and num_nodes={arguments['num_nodes']}"
    say(f"emulating {cluster}{default}{'' if request.nodes or request.gpus_per_node else by_trainer}")


def _gpus(devices: Any, available: int) -> tuple[int, int]:
    """The number of GPUs that a node must have for these `devices`, and the number of ranks on them."""
    if isinstance(devices, str) and "," in devices:
        devices = [int(one) for one in devices.split(",") if one.strip()]
    if isinstance(devices, list | tuple):
        return max(devices, default=0) + 1, len(devices)
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if not isinstance(devices, int) or devices < 1:  # 'auto', -1: all of them; Lightning itself reports mistakes
        return available, available
    return devices, devices


def _without_process_start(strategy: Any) -> Any:
    """The same strategy, but without starting processes, because they already run."""
    if isinstance(strategy, str):
        for start in OTHER_STARTS:
            strategy = strategy.replace(start, "")
    elif getattr(strategy, "_start_method", "popen") != "popen":
        strategy._start_method = "popen"
    return strategy
