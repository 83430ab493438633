"""MayaCallback: emulates a training inside your own program, as an alternative to `maya run`."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from maya_core.errors import MayaError
from maya_core.integration import World
from maya_core.report.prediction import Prediction
from maya_core.request import check_variables, plugin_signature, variables
from maya_core.session.plugin import PluginSession
from maya_huggingface import detected, emulated_train


class MayaCallback(TrainerCallback):
    """Emulates what a Trainer trains, in this process, and predicts what it does to real GPUs.

        maya = MayaCallback("h100", nodes=2, gpus_per_node=8)
        args = TrainingArguments(bf16=True, ...)
        Trainer(model, args, ..., callbacks=[maya]).train()
        maya.prediction

    The emulation is on from here to the end of `train`, which prints the prediction; the model is then what it was before. Create the callback
    before the TrainingArguments: on a machine without a GPU they would refuse bf16=True. The other arguments are the options of `maya run`,
    with underscores: `help(MayaCallback)` lists them.
    """

    def __init__(self, gpu: str | None = None, **options: Any) -> None:
        self._session = PluginSession("MayaCallback", gpu=gpu, **options)
        self._session.begin()
        integration, request = self._session.integration, self._session.request
        assert integration is not None
        if self._session.on:
            detected.set_aside(integration)
            emulated_train.install(integration, self._session)
        by_command = None if self._session.on else integration.request.nodes
        if "LOCAL_RANK" not in os.environ and by_command is None:
            gpus = max(request.gpus_per_node or 1, integration.gpus)
            integration.become_world(World(request.nodes or 1, gpus))

    @property
    def prediction(self) -> Prediction:
        """The prediction, once the training has ended."""
        if self._session.prediction is None:
            raise MayaError(
                "there is no prediction yet.",
                "It is available after `trainer.train()`; under `maya run`, the command prints it and writes it to --out.",
            )
        return self._session.prediction

    @classmethod
    def from_environment(cls) -> MayaCallback:
        """Creates the callback of report_to="maya". Every option has a variable: MAYA_GPU, MAYA_NODES, MAYA_GPUS_PER_NODE, MAYA_STEPS and so on."""
        check_variables()
        return cls(**variables())


MayaCallback.__init__.__signature__ = plugin_signature()  # type: ignore[attr-defined]
