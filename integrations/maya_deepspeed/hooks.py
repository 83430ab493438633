"""Installs the patches of DeepSpeed for an emulation. Each subject has a file of its own."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from maya_core.cpp_build import cache_folder
from maya_core.integration import Integration
from maya_core.patches import Patches
from maya_deepspeed import host_tensors, labels, launch, log, pipeline, recompute, refused, skipped, steps

STATE = (bool, int, list, dict)  # types of a module's state that belongs to a job, besides None


def install(integration: Integration) -> None:
    patches = integration.patches
    patches.supports("deepspeed")
    for part in (launch, steps, labels, recompute, pipeline, host_tensors, skipped, log, refused):
        part.install(integration)
    patches.when_imported("deepspeed.ops.op_builder.builder", functools.partial(_emulated_ops, integration))
    # Nothing is compiled here. Extensions that a program compiles itself go to a separate folder, because they are not built for
    # the emulated GPU.
    patches.when_imported(
        "deepspeed", lambda module: patches.put(os.environ, "TORCH_EXTENSIONS_DIR", str(cache_folder() / "extensions"))
    )
    # DeepSpeed detects the accelerator once and keeps it.
    patches.when_imported(
        "deepspeed.accelerator.real_accelerator", lambda module: patches.set(module, "ds_accelerator", None)
    )
    patches.when_imported(
        "deepspeed.runtime.zero.partition_parameters",
        lambda module: patches.set(module.CUDAQuantizer, "quantizer_cuda_module", None),
    )
    # ZeRO-3 replaces torch's linear, which stays replaced "unless manually reset".
    patches.on_undo(functools.partial(setattr, nn.functional, "linear", nn.functional.linear))
    patches.when_imported("deepspeed.runtime.compiler", functools.partial(_muon_uncompiled, patches))
    for module in ("deepspeed.comm.comm", "deepspeed.utils.groups", "deepspeed.runtime.comm.coalesced_collectives"):
        patches.when_imported(module, functools.partial(_restore_state, patches))


def _muon_uncompiled(patches: Patches, module: ModuleType) -> None:
    """Muon's iteration is compiled where it is defined. The compiled code would not be recorded, so it stays uncompiled."""
    if hasattr(module, "compile"):  # before DeepSpeed 0.18.9, it was not compiled (or there was none)
        patches.set(module, "compile", lambda *_, **__: _uncompiled)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _restore_state(patches: Patches, module: ModuleType) -> None:
    """Restores a module's state on undo, because process groups of the emulated world must not outlive it."""
    state = {name: copy.copy(value) for name, value in vars(module).items() if value is None or type(value) in STATE}
    patches.on_undo(functools.partial(vars(module).update, state))


def _emulated_ops(integration: Integration, module: ModuleType) -> None:
    """Replaces DeepSpeed's own ops, which it would compile on first use. Its caches stay empty."""
    from maya_deepspeed.ops import emulated_op

    patches = integration.patches
    loaded: dict[str, Any] = {}

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(builder: Any, *_: Any, **__: Any) -> Any:
            if builder.name not in loaded:
                loaded[builder.name] = emulated_op(builder.name, integration)
            return loaded[builder.name]

        return load

    patches.set(module.OpBuilder, "load", loading(module.OpBuilder.load))
    patches.set(module.OpBuilder, "is_compatible", lambda builder, verbose=False: True)
