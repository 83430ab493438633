"""Provides the stand-ins of `engine` for Transformer Engine, apex and mamba_ssm, which need a GPU to be built, if they are not installed.

Only Megatron sees them, because other frameworks would change their behaviour. If a program also runs without Transformer Engine on
real GPUs, emulate it with MAYA_TRANSFORMER_ENGINE=0 (and MAYA_APEX=0).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from maya_core.integration import Integration
from maya_core.messages import say
from maya_megatron.engine import device

SWITCHES = {"transformer_engine": "MAYA_TRANSFORMER_ENGINE", "apex": "MAYA_APEX", "mamba_ssm": "MAYA_MAMBA"}
BELONGS_TO = {  # extension modules that belong to a package, or are only used with it
    "causal_conv1d": "mamba_ssm",
    "fused_weight_gradient_mlp_cuda": "apex",
    "scaled_upper_triang_masked_softmax_cuda": "apex",
    "scaled_masked_softmax_cuda": "apex",
    "scaled_softmax_cuda": "apex",
}


def install(integration: Integration) -> None:
    patches = integration.patches
    missing = {
        package
        for package, switch in SWITCHES.items()
        if os.environ.get(switch) != "0" and importlib.util.find_spec(package) is None
    }
    if not missing:
        return
    device.install(integration)
    finder = _Finder(missing)
    sys.meta_path.append(finder)
    patches.on_undo(lambda: sys.meta_path.remove(finder))
    patches.on_undo(finder.forget)


class _Finder(MetaPathFinder):
    """Finds the stand-ins. It is last in the import path, so installed packages are found first."""

    def __init__(self, missing: set[str]) -> None:
        self.missing = missing
        self.found: list[str] = []

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        root = name.partition(".")[0]
        if BELONGS_TO.get(root, root) not in self.missing or "megatron.core" not in sys.modules:
            return None
        modules = _modules()
        if name not in modules:
            return None
        if name == "transformer_engine":
            say(
                "under emulation, a stand-in for Transformer Engine 2.9 is used; `maya help megatron` describes what it covers"
            )
        self.found.append(name)
        below = [other for other in modules if other.startswith(f"{name}.")]
        return ModuleSpec(name, _StandIn(modules[name], below), is_package=bool(below))

    def forget(self) -> None:
        for name in self.found:
            sys.modules.pop(name, None)


class _StandIn(Loader):
    def __init__(self, names: dict[str, Any], below: list[str]) -> None:
        self.names = names
        self.below = below

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.names)
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
        else:  # submodules are imported with the package, as in the originals
            for name in self.below:
                importlib.import_module(name)


@functools.cache
def _modules() -> dict[str, dict[str, Any]]:
    # Imported only when Megatron needs it: layers derive from torch's, which is still being imported when the emulation starts.
    from maya_megatron.engine.modules import APEX, MAMBA, TRANSFORMER_ENGINE

    return {**TRANSFORMER_ENGINE, **APEX, **MAMBA}
