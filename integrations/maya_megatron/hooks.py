"""What changes in Megatron while an emulation is on: each part in a file of its own, put on when the program imports what it is
about, and undone when the emulation ends. Checked with megatron-core 0.16.1 and the Megatron-LM repository of that version."""

from __future__ import annotations

from maya_core.launch.emulation import Emulation
from maya_megatron import datasets, fusion, kernels, left_out, log, offloading, packages, ranks, state, steps


def put_on(emulation: Emulation) -> None:
    for part in (state, fusion, kernels, packages, ranks, datasets, steps, log, left_out, offloading):
        part.put_on(emulation)
