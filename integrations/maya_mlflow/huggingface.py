"""The recorder of actual runs as a callback of Hugging Face's Trainer:

Trainer(..., callbacks=[maya_mlflow.huggingface.RecordActual()])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from maya_mlflow.recorder import record_actual


class RecordActual(TrainerCallback):
    """Arguments are those of `record_actual`. Steps are the Trainer's own."""

    def __init__(self, **options: Any) -> None:
        self.record = record_actual(**options)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.record.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.record.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.record.finish()
