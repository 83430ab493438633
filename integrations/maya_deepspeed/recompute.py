"""ZeRO-3's linear layers are autograd functions, and torch runs those without gradients: in a checkpointed layer that is computed again they
would be taken for backward's own work, and not for the second forward that they are. Checked with deepspeed 0.19."""

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
            with torch.enable_grad():  # which tells a forward; nothing is kept of tensors that need no gradients
                return original(*(one if one is None else one.detach() for one in inputs))

        patches.set(function, "forward", staticmethod(forward))

    patches.when_imported("deepspeed.runtime.zero.linear", linear)
