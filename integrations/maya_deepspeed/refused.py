"""Settings of DeepSpeed's that cannot be emulated: refused by name when the configuration is read, before anything is built by it.
Ops without a stand-in are refused when they are loaded (ops.py). Checked with deepspeed 0.19."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from maya_core.errors import MayaError
from maya_core.integration import Integration


def install(integration: Integration) -> None:
    patches = integration.patches

    def config(module: ModuleType) -> None:
        original = module.DeepSpeedConfig.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for refusal in refusals(self):
                raise refusal

        patches.set(module.DeepSpeedConfig, "__init__", __init__)

    patches.when_imported("deepspeed.runtime.config", config)


def refusals(config: Any) -> Iterator[MayaError]:
    zero = config.zero_config
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        if offload is not None and offload.device == "nvme":
            yield MayaError(
                f"{name} to NVMe cannot be emulated: the speed of the drives, and what of it is hidden, is not known.",
                'Emulate with "device": "cpu": the GPUs\' memory is the same, and the step is a lower bound.',
            )
    beside = [name for name, on in _optimizers_beside(zero).items() if on]
    if beside:
        yield MayaError(
            f"{beside[0]} cannot be emulated: it steps the optimizer in processes of its own, beside the GPU's work.",
            "Emulate offload_optimizer without it: the step is an upper bound.",
        )
    if config.compile_config.deepcompile:
        yield MayaError(
            "deepcompile cannot be emulated: it puts ops of its own, compiled for a GPU, into what torch.compile makes of a program.",
            "Leave it out: the eager program is an upper bound of its time.",
        )


def _optimizers_beside(zero: Any) -> dict[str, bool]:
    return {
        "super_offload": bool(getattr(zero.offload_optimizer, "super_offload", False)),
        "zenflow's overlap_step": bool(getattr(zero.zenflow, "overlap_step", False)),
    }
