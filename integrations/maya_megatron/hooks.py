"""Installs the patches of Megatron for an emulation. Each subject has a file of its own. Patches are applied when the program imports
the module and undone when the emulation ends. Checked with megatron-core 0.16.1 and the Megatron-LM repository of that version."""

from __future__ import annotations

from maya_core.integration import Integration
from maya_megatron import datasets, fusion, kernels, log, offloading, packages, ranks, skipped, state, steps


def install(integration: Integration) -> None:
    for part in (state, fusion, kernels, packages, ranks, datasets, steps, log, skipped, offloading):
        part.install(integration)
