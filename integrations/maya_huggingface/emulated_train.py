"""Patches `Trainer.train` for an emulation that a MayaCallback started. It returns after the requested steps and ends the emulation;
model and arguments are then restored to what they were before the Trainer was created."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import transformers.trainer as trainer_module
from torch import nn
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PredictionOutput, TrainOutput

from maya_core.errors import MayaError
from maya_core.integration import Integration, ModelState
from maya_core.messages import say
from maya_core.report.prediction import Prediction
from maya_core.session.plugin import PluginSession
from maya_huggingface.skipped import NoMetrics

ANSWERS: dict[str, Any] = {
    "evaluate": NoMetrics(),
    "predict": PredictionOutput(predictions=None, label_ids=None, metrics=NoMetrics()),  # type: ignore[arg-type]
    **dict.fromkeys(("save_model", "save_state", "save_metrics", "push_to_hub", "create_model_card")),
}


def install(integration: Integration, session: PluginSession) -> None:
    patches, trainer = integration.patches, trainer_module.Trainer
    before: dict[str, Any] = {}  # the state of the Trainer's arguments before the emulation
    patches.set(trainer, "__init__", _on_emulated_gpus(trainer.__init__, before))
    patches.set(trainer, "train", _ending(trainer.train, session, before))
    patches.set(CallbackHandler, "add_callback", _only_one(CallbackHandler.add_callback))


def _only_one(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_callback(self: Any, callback: Any) -> None:
        from maya_huggingface.callback import MayaCallback

        if isinstance(callback, MayaCallback) and any(isinstance(one, MayaCallback) for one in self.callbacks):
            raise MayaError("this Trainer has two MayaCallbacks.", "Give it only one: report_to='maya' also adds one.")
        original(self, callback)

    return add_callback


def _on_emulated_gpus(original: Callable[..., None], before: dict[str, Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if args is not None:
            before["args"] = (args, dict(vars(args)))
            _set_up_again(args)
        if isinstance(model, nn.Module):
            before["model"] = ModelState(model)
        original(self, model, args, *rest, **kwargs)

    return __init__


def _set_up_again(args: Any) -> None:
    if args.use_cpu:
        raise MayaError(
            "use_cpu=True does not work together with a MayaCallback, which emulates GPUs.",
            "Remove use_cpu to emulate GPUs, or remove the callback to train on the CPU.",
        )
    if args.device.type == "cuda":
        return
    if args.deepspeed:
        raise MayaError(
            "these TrainingArguments were created before the MayaCallback, so DeepSpeed's batch sizes are those of this machine.",
            "Create the MayaCallback first.",
        )
    _forget_devices(args)  # they are not GPUs; looked for again, the emulated ones are found
    _ = args.device


def _forget_devices(args: Any) -> None:
    """Makes the arguments look for the devices again."""
    for cached in ("_setup_devices", "__cached__setup_devices"):  # the second before transformers 5
        vars(args).pop(cached, None)


def _ending(original: Callable[..., Any], session: PluginSession, before: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.device.type != "cuda":
            session.drop()
            raise MayaError(
                "this Trainer was created before the emulation started.",
                "Create the MayaCallback before the Trainer; with report_to='maya', import maya_huggingface.reporting before "
                "you create TrainingArguments.",
            )
        failure: BaseException | None = None
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            failure = error
        # The last step may have ended in its optimizer, before Trainer counted it.
        recorded = len(session.integration.steps.ends) if session.integration is not None else 0
        steps, of = max(self.state.global_step, recorded), self.state.max_steps
        _release(self, before)
        stopped = session.end(failure)
        _disable(self)
        if failure is not None and not stopped:
            raise failure
        return TrainOutput(steps, float("nan"), _metrics(session.prediction, of))

    return train


def _release(trainer: Any, before: dict[str, Any]) -> None:
    """Removes everything of the emulated device from the Trainer and from the user's objects."""
    trainer.accelerator.free_memory()
    trainer.optimizer = trainer.lr_scheduler = trainer._tr_loss = None
    handler = trainer.callback_handler
    handler.optimizer = handler.lr_scheduler = handler.train_dataloader = None
    if "model" in before:
        before["model"].put_back()
    trainer.model_wrapped = trainer.deepspeed = None
    if "args" in before:
        args, attributes = before["args"]
        vars(args).clear()
        vars(args).update(attributes)
        if args.device.type == "cuda":  # created under emulation; looked for again, the real devices are found
            _forget_devices(args)
    before.clear()


def _disable(trainer: Any) -> None:
    """Makes later calls of the Trainer harmless: its weights were never trained, and its GPUs do not exist any more."""
    for name, answer in ANSWERS.items():
        setattr(trainer, name, _skipped(name, answer))

    def train(*args: Any, **kwargs: Any) -> None:
        raise MayaError(
            "this Trainer was emulated, and its emulated GPUs do not exist any more.", "Create a new Trainer."
        )

    trainer.train = train


def _skipped(name: str, answer: Any) -> Callable[..., Any]:
    def skip(*args: Any, **kwargs: Any) -> Any:
        say(f"trainer.{name} is skipped: the emulated training has no weights to use")
        return answer

    return skip


def _metrics(prediction: Prediction | None, steps: int) -> dict[str, float]:
    """Predicted values under the Trainer's own names."""
    if prediction is None or not prediction.step_time_s:
        return {}
    found = {
        "train_runtime": prediction.step_time_s * steps,
        "train_steps_per_second": 1 / prediction.step_time_s,
        "train_samples_per_second": prediction.samples_per_s,
        "train_tokens_per_second": prediction.tokens_per_s,
    }
    return {name: value for name, value in found.items() if value is not None}
