"""What accelerate does only every so many batches: said, where the steps that are emulated end before. Checked with accelerate 1.15."""

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
        if period >= limit:  # the first step is no steady one
            integration.skip(
                f"{limit} steps are recorded, and LocalSGD averages the weights every {period}: the step is told without that. "
                f"--steps {1 + period} has it in the mean"
            )

    integration.patches.set(module.LocalSGD, "__init__", __init__)
