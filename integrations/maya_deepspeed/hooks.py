"""What changes in DeepSpeed while an emulation is on. Checked with deepspeed 0.19."""

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

STATE = (bool, int, list, dict)  # what a module keeps of the job, beside None


def install(integration: Integration) -> None:
    patches = integration.patches
    for part in (launch, steps, labels, recompute, pipeline, host_tensors, skipped, log, refused):
        part.install(integration)
    patches.when_imported("deepspeed.ops.op_builder.builder", functools.partial(_emulated_ops, integration))
    # Nothing is compiled here. What a program compiles itself, or in a process of its own, was not made for the GPU it is told of.
    patches.when_imported(
        "deepspeed", lambda module: patches.put(os.environ, "TORCH_EXTENSIONS_DIR", str(cache_folder() / "extensions"))
    )
    # Found out once and kept: which accelerator there is.
    patches.when_imported(
        "deepspeed.accelerator.real_accelerator", lambda module: patches.set(module, "ds_accelerator", None)
    )
    patches.when_imported(
        "deepspeed.runtime.zero.partition_parameters",
        lambda module: patches.set(module.CUDAQuantizer, "quantizer_cuda_module", None),
    )
    # ZeRO-3 puts a linear of its own in torch's place, which stays "unless manually reset".
    patches.on_undo(functools.partial(setattr, nn.functional, "linear", nn.functional.linear))
    # Muon's iteration is compiled where it is defined; what torch.compile makes of it is not recorded, so it stays as it is written.
    patches.when_imported(
        "deepspeed.runtime.compiler", lambda module: patches.set(module, "compile", lambda *_, **__: _as_written)
    )
    for module in ("deepspeed.comm.comm", "deepspeed.utils.groups", "deepspeed.runtime.comm.coalesced_collectives"):
        patches.when_imported(module, functools.partial(_as_found, patches))


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _as_found(patches: Patches, module: ModuleType) -> None:
    """Process groups of the emulated world must not outlive it."""
    state = {name: copy.copy(value) for name, value in vars(module).items() if value is None or type(value) in STATE}
    patches.on_undo(functools.partial(vars(module).update, state))


def _emulated_ops(integration: Integration, module: ModuleType) -> None:
    """DeepSpeed compiles its own ops when they are first used: it gets ours instead, and its caches get nothing."""
    from maya_deepspeed.ops import emulated_op

    patches = integration.patches
    loaded: dict[str, Any] = {}

    def load(of: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(of)
        def load(builder: Any, *_: Any, **__: Any) -> Any:
            if builder.name not in loaded:
                loaded[builder.name] = emulated_op(builder.name, integration)
            return loaded[builder.name]

        return load

    patches.set(module.OpBuilder, "load", load(module.OpBuilder.load))
    patches.set(module.OpBuilder, "is_compatible", lambda builder, verbose=False: True)
