"""Kernels that Megatron would compile with nvcc, or that are Triton's: what cannot be built without a GPU is not."""

from __future__ import annotations

from typing import Any

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    patches = integration.patches
    # The legacy models' extensions; Megatron Core takes its own paths where they are missing.
    patches.when_imported("megatron.legacy.fused_kernels", lambda module: patches.set(module, "load", _nothing))


def _nothing(*_: Any) -> None:
    return None
