"""Makes recomputation visible in ZeRO-3's linear layers. They are autograd functions, which torch runs without gradients. In a
checkpointed layer they would therefore count as backward instead of recomputation."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    patches = integration.patches

    def linear(module: ModuleType) -> None:
        function = module.LinearFunctionForZeroStage3
        original = function.forward

        @functools.wraps(original)
        def forward(*inputs: torch.Tensor | None) -> torch.Tensor:
            with torch.enable_grad():  # marks a forward; detached tensors need no gradients, so nothing is saved
                return original(*(one if one is None else one.detach() for one in inputs))

        patches.set(function, "forward", staticmethod(forward))

    patches.when_imported("deepspeed.runtime.zero.linear", linear)
