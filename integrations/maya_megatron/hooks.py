"""What changes in Megatron while an emulation is on: each part in a file of its own, put on when the program imports what it is
about, and undone when the emulation ends. Checked with megatron-core 0.16.1 and the Megatron-LM repository of that version."""

from __future__ import annotations

from maya_core.integration import Integration
from maya_megatron import datasets, fusion, kernels, log, offloading, packages, ranks, skipped, state, steps


def install(integration: Integration) -> None:
    for part in (state, fusion, kernels, packages, ranks, datasets, steps, log, skipped, offloading):
        part.install(integration)
