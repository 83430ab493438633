"""Restores what Megatron keeps about a job in its modules: process groups, arguments, random states and detected packages. It must not
outlive the emulated world. Modules that were imported before are restored; the others are removed and will be imported again."""

from __future__ import annotations

import copy
import functools
import sys
from types import ModuleType

from maya_core.integration import Integration
from maya_core.patches import Patches

MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.tensor_parallel.random",
    "megatron.core.rerun_state_machine",
    "megatron.training.global_vars",
)
STATE = (bool, int, list, dict)  # besides None


def install(integration: Integration) -> None:
    integration.patches.on_undo(functools.partial(_forget_new, set(sys.modules)))
    for name in MODULES:
        integration.patches.when_imported(name, functools.partial(_restore_state, integration.patches))


def _forget_new(before: set[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron" and name not in before]:
        del sys.modules[name]


def _restore_state(patches: Patches, module: ModuleType) -> None:
    state = {name: copy.copy(value) for name, value in vars(module).items() if value is None or type(value) in STATE}
    patches.on_undo(functools.partial(vars(module).update, state))
