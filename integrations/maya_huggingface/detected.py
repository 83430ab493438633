"""Saves what transformers, accelerate and DeepSpeed remember about a process (its devices, its world, its plugins) before an
emulation, and restores it afterwards. This is needed in processes that continue after the emulation."""

from __future__ import annotations

import functools
import os
import sys

from maya_core.integration import Integration

# Modules whose functions cache which devices and packages are available.
CACHES = ("transformers.utils.import_utils", "accelerate.utils.imports", "accelerate.utils.environment")
STATES = ("PartialState", "AcceleratorState", "GradientState")  # singletons of accelerate
VARIABLES = ("ACCELERATE_", "FSDP_")  # in which an Accelerator publishes its plugins
GLOBALS = {"deepspeed.comm.comm": "cdb", "transformers.integrations.deepspeed": "_hf_deepspeed_config_weak_ref"}


def set_aside(integration: Integration) -> None:
    patches = integration.patches
    patches.on_undo(_forget)  # runs last, because patches are undone in reverse order
    states = sys.modules["accelerate.state"]
    for name in STATES:
        shared = getattr(states, name)._shared_state
        patches.on_undo(functools.partial(shared.update, dict(shared)))
        patches.on_undo(shared.clear)
        shared.clear()
    patches.on_undo(functools.partial(_restore_variables, dict(os.environ)))
    for module, name in GLOBALS.items():
        patches.on_undo(functools.partial(_restore_global, module, name, getattr(sys.modules.get(module), name, None)))
    _forget()


def _forget() -> None:
    for name in CACHES:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _restore_variables(before: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(VARIABLES) and name not in before]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name.startswith(VARIABLES)})


def _restore_global(module: str, name: str, before: object) -> None:
    if module in sys.modules:
        setattr(sys.modules[module], name, before)
