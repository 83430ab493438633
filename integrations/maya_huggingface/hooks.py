"""What changes in transformers, accelerate and their relatives while an emulation is on: each part in a file of its own, put on
when the program imports what it is about, and undone when the emulation ends. Checked with transformers 5.22,
accelerate 1.15, peft 0.21 and trl 1.16."""

from __future__ import annotations

from maya_core.integration import Integration
from maya_huggingface import data, flash_attention, launch, packages, periods, report_to, skipped, triton_kernels, world


def install(integration: Integration) -> None:
    for part in (launch, world, data, skipped, periods, flash_attention, triton_kernels, packages):
        part.install(integration)
    report_to.register(integration.patches)
