"""Installs the patches of Megatron for an emulation. Each subject has a file of its own. Patches are applied when the program imports
the module and undone when the emulation ends."""

from __future__ import annotations

from maya_core.integration import Integration
from maya_megatron import datasets, fusion, kernels, log, offloading, packages, ranks, skipped, state, steps


def install(integration: Integration) -> None:
    integration.patches.supports("megatron-core", module="megatron.core")
    for part in (state, fusion, kernels, packages, ranks, datasets, steps, log, skipped, offloading):
        part.install(integration)
