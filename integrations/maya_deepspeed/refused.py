"""Refuses DeepSpeed settings that cannot be emulated, when the configuration is read and before anything is built. Ops without a
stand-in are refused when they are loaded (ops.py)."""

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
                f"{name} to NVMe cannot be emulated: the speed of the drives is not known.",
                'Emulate with "device": "cpu": the GPU memory is the same, and the step time is a lower bound.',
            )
    separate = [name for name, on in _separate_optimizers(zero).items() if on]
    if separate:
        yield MayaError(
            f"{separate[0]} cannot be emulated: it steps the optimizer in separate processes while the GPU works.",
            "Emulate offload_optimizer without it: the step time is an upper bound.",
        )
    if config.compile_config.deepcompile:
        yield MayaError(
            "deepcompile cannot be emulated: it adds its own ops, compiled for a GPU, to the graphs of torch.compile.",
            "Emulate without it: the time of the eager program is an upper bound.",
        )


def _separate_optimizers(zero: Any) -> dict[str, bool]:
    return {
        "super_offload": bool(getattr(zero.offload_optimizer, "super_offload", False)),
        "zenflow's overlap_step": bool(getattr(getattr(zero, "zenflow", None), "overlap_step", False)),
    }
