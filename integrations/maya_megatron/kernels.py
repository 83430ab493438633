"""Skips kernels that Megatron would compile with nvcc, which needs a GPU."""

from __future__ import annotations

from typing import Any

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    patches = integration.patches
    # The extensions of legacy models. Megatron Core works without them.
    patches.when_imported("megatron.legacy.fused_kernels", lambda module: patches.set(module, "load", _nothing))


def _nothing(*_: Any) -> None:
    return None
