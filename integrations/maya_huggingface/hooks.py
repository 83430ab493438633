"""Installs the patches of transformers, accelerate and related packages for an emulation. Each subject has a file of its own. Patches
are applied when the program imports the package and undone when the emulation ends."""

from __future__ import annotations

from maya_core.integration import Integration
from maya_huggingface import (
    data,
    evaluation,
    flash_attention,
    launch,
    packages,
    periods,
    report_to,
    skipped,
    triton_kernels,
    world,
)


def install(integration: Integration) -> None:
    for project in ("transformers", "accelerate"):
        integration.patches.supports(project)
    for part in (launch, world, data, skipped, evaluation, periods, flash_attention, triton_kernels, packages):
        part.install(integration)
    report_to.register(integration.patches)
