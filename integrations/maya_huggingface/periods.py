"""Warns if the emulation ends before something that accelerate does only every few batches."""

from __future__ import annotations

import functools
from math import ceil
from types import ModuleType
from typing import Any

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    integration.patches.when_imported("accelerate.local_sgd", functools.partial(_local_sgd, integration))


def _local_sgd(integration: Integration, module: ModuleType) -> None:
    original = module.LocalSGD.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        limit = integration.steps.limit
        if not self.enabled or limit is None:
            return
        period = ceil(self.local_sgd_steps / self.accelerator.gradient_accumulation_steps)
        if period >= limit:  # the first step is not a steady one
            integration.skip(
                f"only {limit} steps are recorded, but LocalSGD averages the weights every {period} steps, so the step time does not include it. "
                f"Use --steps {1 + period} to include it"
            )

    integration.patches.set(module.LocalSGD, "__init__", __init__)
