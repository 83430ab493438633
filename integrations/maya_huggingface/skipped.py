"""Skips saving, uploading, loggers, progress bars and the Trainer's own speeds under emulation. Weights are not computed, so they cannot
be saved, and times on this machine are not those of the GPUs. The steps themselves and learning rates are unchanged. Of evaluation,
evaluation.py runs a part after the last step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration, StopProgram, first_of

# Classes that write to a folder of the user. They may do so before training starts: scripts create tokenizers and models in this way.
SAVERS = {
    "transformers.modeling_utils": "PreTrainedModel",
    "transformers.configuration_utils": "PreTrainedConfig",  # before transformers 5, PretrainedConfig
    "transformers.tokenization_utils_base": "PreTrainedTokenizerBase",
    "transformers.processing_utils": "ProcessorMixin",
    "transformers.feature_extraction_utils": "FeatureExtractionMixin",
    "transformers.image_processing_base": "ImageProcessingMixin",
    "transformers.generation.configuration_utils": "GenerationConfig",
    "peft.peft_model": "PeftModel",
}
HUB = ("create_commit", "create_branch", "create_tag", "upload_file", "upload_folder", "upload_large_folder")
LOGGERS = "transformers.integrations.integration_utils"  # all callbacks of this module are loggers
PROGRESS = ("ProgressCallback", "PrinterCallback", "NotebookProgressCallback")


class NoMetrics(dict[str, float]):
    """The metrics of an emulated evaluation: every value is NaN."""

    def __missing__(self, name: str) -> float:
        return float("nan")


def install(integration: Integration) -> None:
    patches = integration.patches
    patches.when_imported("transformers.trainer", functools.partial(_trainer, integration))
    patches.when_imported("transformers.training_args", functools.partial(_arguments, integration))
    patches.when_imported("transformers.trainer_callback", functools.partial(_callbacks, integration))
    patches.when_imported("accelerate.accelerator", functools.partial(_accelerator, integration))
    patches.when_imported("huggingface_hub.hf_api", functools.partial(_hub, integration))
    for module, name in SAVERS.items():
        patches.when_imported(module, functools.partial(_saver, integration, name))


def _trainer(integration: Integration, module: ModuleType) -> None:
    patches, trainer = integration.patches, module.Trainer
    log_save_evaluate, predict = trainer._maybe_log_save_evaluate, trainer.predict

    @functools.wraps(log_save_evaluate)
    def only_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.control.should_evaluate:
            integration.skip("evaluation is skipped, except for its first batches after the last step")
        if self.control.should_save:
            integration.skip("checkpoints are not written")
        self.control.should_evaluate = self.control.should_save = False
        return log_save_evaluate(self, *args, **kwargs)

    @functools.wraps(predict)
    def no_predictions(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Ends the program, because it would use predictions that do not exist, and might overwrite real ones."""
        if self.train_dataset is None:
            return predict(self, *args, **kwargs)
        if not integration.owns_process:  # the process belongs to the user and continues afterwards
            integration.skip("there are no predictions")
            return module.PredictionOutput(predictions=None, label_ids=None, metrics=NoMetrics())
        integration.skip("there are no predictions: the program ends here")
        raise StopProgram(0)

    patches.set(trainer, "_maybe_log_save_evaluate", only_log)
    patches.set(trainer, "predict", no_predictions)
    for name in ("_save_checkpoint", "save_model", "save_state", "save_metrics", "create_model_card"):
        patches.set(trainer, name, _nothing(integration, "Trainer writes nothing"))
    for name in ("init_hf_repo", "push_to_hub", "_push_from_checkpoint"):
        patches.set(trainer, name, _nothing(integration, "nothing is uploaded"))
    patches.set(module, "speed_metrics", lambda *args, **kwargs: {})
    patches.set(module, "get_reporting_integration_callbacks", _only_maya)


def _only_maya(report_to: Any) -> list[Any]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    requested = [report_to] if isinstance(report_to, str) else report_to or []
    return [INTEGRATION_TO_CALLBACK[name] for name in requested if name == "maya"]


def _arguments(integration: Integration, module: ModuleType) -> None:
    """Prevents that the folder for results is created."""
    integration.patches.set(module.TrainingArguments, "should_save", property(lambda self: False))


def _callbacks(integration: Integration, module: ModuleType) -> None:
    add = module.CallbackHandler.add_callback

    @functools.wraps(add)
    def add_callback(self: Any, callback: Any) -> None:
        kind = callback if isinstance(callback, type) else type(callback)
        if any(parent.__name__ in PROGRESS and parent.__module__.startswith("transformers") for parent in kind.__mro__):
            return
        if any(parent.__module__ == LOGGERS for parent in kind.__mro__):
            integration.skip(f"{kind.__name__} reports nothing")
            return
        add(self, callback)

    integration.patches.set(module.CallbackHandler, "add_callback", add_callback)


def _accelerator(integration: Integration, module: ModuleType) -> None:
    patches, accelerator = integration.patches, module.Accelerator

    def save_state(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str | None:
        integration.skip("accelerate writes no checkpoints")
        return output_dir

    def init_trackers(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.log_with:
            integration.skip("trackers report nothing")
        self.trackers = []

    patches.set(accelerator, "save_state", save_state)
    patches.set(accelerator, "save_model", _nothing(integration, "accelerate writes no checkpoints"))
    patches.set(accelerator, "init_trackers", init_trackers)


def _hub(integration: Integration, module: ModuleType) -> None:
    def create_repo(self: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        integration.skip("nothing is uploaded")
        return module.RepoUrl(f"{self.endpoint}/{repo_id if '/' in repo_id else 'emulated/' + repo_id}")

    instead = {"create_repo": create_repo, **dict.fromkeys(HUB, _nothing(integration, "nothing is uploaded"))}
    integration.patches.require(
        module.HfApi, "create_commit", instead["create_commit"]
    )  # through which everything is uploaded
    for name, function in instead.items():
        for owner, value in ((module.HfApi, function), (module, functools.partial(function, module.api))):
            if hasattr(owner, name):  # versions of the hub's client have different ways to upload
                integration.patches.set(owner, name, value)


def _saver(integration: Integration, name: str, module: ModuleType) -> None:
    saver = first_of(module, name, name.replace("PreTrained", "Pretrained"))
    original = saver.save_pretrained

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = isinstance(self, torch.nn.Module) and any(one.is_cuda for one in self.parameters())
        if not integration.steps.begun and not moved:
            return original(self, *args, **kwargs)
        integration.skip("save_pretrained writes nothing")
        return None

    integration.patches.set(saver, "save_pretrained", save_pretrained)


def _nothing(integration: Integration, what: str) -> Callable[..., None]:
    def skip(self: Any, *args: Any, **kwargs: Any) -> None:
        integration.skip(what)

    return skip
