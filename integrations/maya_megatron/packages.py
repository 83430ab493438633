"""Transformer Engine, apex and mamba_ssm, which are built for a GPU: where they are missing, Megatron finds those of `engine` in their place.

Nobody but Megatron does: other frameworks ask whether they are installed, and go other ways if so. A program that is to run without
Transformer Engine on the GPUs as well is emulated with MAYA_TRANSFORMER_ENGINE=0 (and MAYA_APEX=0).
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
BELONGS_TO = {  # extension modules that come with a package, or are of use with it alone
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
    """Asked last, so what is installed is found before."""

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
            say("under emulation Transformer Engine is taken as its 2.9; docs/megatron.md says what of it there is")
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
        else:  # modules below are there as soon as the package is, as theirs are
            for name in self.below:
                importlib.import_module(name)


@functools.cache
def _modules() -> dict[str, dict[str, Any]]:
    # Not before Megatron asks: layers are made of torch's, which is still being imported when the emulation is put on.
    from maya_megatron.engine.modules import APEX, MAMBA, TRANSFORMER_ENGINE

    return {**TRANSFORMER_ENGINE, **APEX, **MAMBA}
