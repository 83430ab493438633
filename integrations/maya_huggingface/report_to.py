"""Supports `report_to="maya"` in TrainingArguments: a MayaCallback that is configured by environment variables. The emulation starts
with the arguments, because they look for GPUs at once."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from maya_core.patches import Patches

NAME = "maya"


def register(patches: Patches) -> None:
    patches.when_imported("transformers.integrations.integration_utils", functools.partial(_add_name, patches))
    patches.when_imported("transformers.training_args", functools.partial(_begin_early, patches))


def _add_name(patches: Patches, integrations: ModuleType) -> None:
    class Maya:
        """Created by Trainer, unless the arguments have already created it."""

        def __new__(cls) -> Any:
            from maya_huggingface.callback import MayaCallback

            return MayaCallback.from_environment()

    patches.put(integrations.INTEGRATION_TO_CALLBACK, NAME, Maya)


def _begin_early(patches: Patches, module: ModuleType) -> None:
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        requested = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        if NAME in requested:
            import transformers.integrations.integration_utils as integrations

            from maya_core.session.plugin import PluginSession
            from maya_huggingface.callback import MayaCallback

            if PluginSession.current is None:
                known: dict[str, Any] = integrations.INTEGRATION_TO_CALLBACK
                known[NAME] = MayaCallback.from_environment()
        original(self)

    patches.set(module.TrainingArguments, "__post_init__", __post_init__)
