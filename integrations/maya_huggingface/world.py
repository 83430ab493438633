"""Handles a program without a launcher that sees several GPUs. On a real machine Trainer would use nn.DataParallel, and a loop with
accelerate would leave all but one GPU idle. Neither is what the user wants to predict, so the process becomes rank 0 of a DDP world."""

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
    patches.when_imported("accelerate.state", functools.partial(_become_world, integration))
    for module in (
        "accelerate.launchers",
        "accelerate",
    ):  # the second module also has the name, if the first was imported before
        if module != "accelerate" or "accelerate.launchers" in sys.modules:
            patches.when_imported(module, functools.partial(_from_a_notebook, integration))


def _from_a_notebook(integration: Integration, module: ModuleType) -> None:
    """Makes the process of the notebook rank 0. The real notebook_launcher forks a process for each GPU."""

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


def _become_world(integration: Integration, state: ModuleType) -> None:
    """Patches PartialState, which TrainingArguments and every Accelerator create first."""
    original = state.PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not cpu and not self._shared_state and "LOCAL_RANK" not in os.environ and integration.gpus > 1:
            world = World(integration.request.nodes or 1, integration.gpus)
            say(
                f"one process sees {world.size:,} GPUs: emulating {world.size:,} ranks of DistributedDataParallel, as torchrun "
                "would start them, instead of nn.DataParallel"
            )
            integration.become_world(world)
        original(self, cpu, **kwargs)

    integration.patches.set(state.PartialState, "__init__", __init__)
