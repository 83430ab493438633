"""MayaCallback: an emulated training inside a program of one's own, for those who prefer code to `maya run`."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import TrainerCallback

from maya_core.errors import MayaError
from maya_core.launch.world import World
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION
from maya_core.report.prediction import Prediction
from maya_core.session.plugin import Asked, PluginSession
from maya_huggingface import detected, emulated_train


class MayaCallback(TrainerCallback):
    """Emulates what a Trainer trains, in this process, and predicts what it does to real GPUs.

        maya = MayaCallback("h100", nodes=2, gpus_per_node=8)
        args = TrainingArguments(bf16=True, ...)
        Trainer(model, args, ..., callbacks=[maya]).train()
        maya.prediction

    The emulation is on from here to the end of `train`, which prints the prediction; the model is then what it was before. Arguments
    made earlier are set up anew, but bf16=True was refused by then on a machine without GPU: make the callback first.
    """

    def __init__(
        self,
        gpu: str | None = None,
        *,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
        steps: int = 3,
        node: str | None = None,
        network: str | None = None,
        price_per_gpu_hour: float | None = None,
        attention: str = DEFAULT_ATTENTION,
        samples_per_step: float | None = None,
        tokens_per_step: float | None = None,
        out: str | Path | None = None,
        html: str | Path | None = None,
        json: str | Path | None = None,
        mlflow: bool | str = False,
    ) -> None:
        asked = Asked(
            gpu=gpu,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            steps=steps,
            node=node,
            network=network,
            price_per_gpu_hour=price_per_gpu_hour,
            attention=attention,
            samples_per_step=samples_per_step,
            tokens_per_step=tokens_per_step,
            out=out,
            html=html,
            json=json,
            mlflow=mlflow,
        )
        self._session = PluginSession("MayaCallback", asked)
        self._session.begin()
        emulation = self._session.emulation
        assert emulation is not None
        if self._session.on:
            detected.set_aside(emulation)
            emulated_train.install(emulation, self._session)
        if "LOCAL_RANK" not in os.environ and emulation.settings.nodes is None:
            emulation.become_world(World(nodes or 1, max(gpus_per_node or 1, emulation.device.gpus)))

    @property
    def prediction(self) -> Prediction:
        if self._session.prediction is None:
            raise MayaError(
                "there is no prediction yet.",
                "It is there after `trainer.train()`; under `maya run`, the command prints it and writes it to --out.",
            )
        return self._session.prediction

    @classmethod
    def from_environment(cls) -> MayaCallback:
        """What report_to="maya" means: MAYA_GPU, MAYA_NODES, MAYA_GPUS_PER_NODE and MAYA_STEPS say what is emulated, MAYA_MLFLOW
        (1, or the name of an experiment) that the prediction is logged."""
        return cls(
            os.environ.get("MAYA_GPU"),
            nodes=_number("MAYA_NODES"),
            gpus_per_node=_number("MAYA_GPUS_PER_NODE"),
            steps=_number("MAYA_STEPS") or 3,
            mlflow=_mlflow(os.environ.get("MAYA_MLFLOW", "")),
        )


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdigit():
        raise MayaError(f"{name}={text} is no number.", f"Set {name} to a number from 1, or unset it.")
    return None if text is None else int(text)


def _mlflow(text: str) -> bool | str:
    return text in ("1", "true") or ("" if text in ("", "0", "false") else text) or False
