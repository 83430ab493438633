"""A program that nobody launched and that sees several GPUs. On a real machine Trainer would fall into nn.DataParallel, and a loop
of accelerate's would leave all but one GPU idle: neither is what is asked of Maya, so the process becomes rank 0 of a DDP world."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import Integration, World
from maya_core.messages import say


def install(integration: Integration) -> None:
    patches = integration.patches
    patches.when_imported("accelerate.state", functools.partial(_joined, integration))
    for module in ("accelerate.launchers", "accelerate"):  # the second has the name by then, if it was imported before
        if module != "accelerate" or "accelerate.launchers" in sys.modules:
            patches.when_imported(module, functools.partial(_from_a_notebook, integration))


def _from_a_notebook(integration: Integration, module: ModuleType) -> None:
    """notebook_launcher forks a process for each GPU: here the notebook's own becomes rank 0."""

    @functools.wraps(module.notebook_launcher)
    def notebook_launcher(
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        num_processes: int | None = None,
        *_: Any,
        num_nodes: int = 1,
        **__: Any,
    ) -> None:
        if "LOCAL_RANK" not in os.environ:
            integration.become_world(World(num_nodes, num_processes or integration.gpus))
        function(*args)

    integration.patches.set(module, "notebook_launcher", notebook_launcher)


def _joined(integration: Integration, state: ModuleType) -> None:
    """Trainer's arguments and every Accelerator ask PartialState first."""
    original = state.PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not cpu and not self._shared_state and "LOCAL_RANK" not in os.environ and integration.gpus > 1:
            world = World(integration.request.nodes or 1, integration.gpus)
            say(
                f"{world.size:,} GPUs and one process: emulated as {world.size:,} ranks of DistributedDataParallel, as torchrun "
                "would start them, and not as nn.DataParallel"
            )
            integration.become_world(world)
        original(self, cpu, **kwargs)

    integration.patches.set(state.PartialState, "__init__", __init__)
