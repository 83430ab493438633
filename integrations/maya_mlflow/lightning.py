"""The recorder of actual runs as a callback of Lightning, of either distribution:

Trainer(..., callbacks=[maya_mlflow.lightning.RecordActual()])
"""

from __future__ import annotations

import sys
from typing import Any

from maya_mlflow.recorder import record_actual

CALLBACKS = ("lightning.pytorch.callbacks.callback", "pytorch_lightning.callbacks.callback")


class Recording:
    """The callback without its base class. Its arguments are those of `record_actual`."""

    def __init__(self, **options: Any) -> None:
        self.record = record_actual(**options)
        self._by_hand, self._last = False, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # DeepSpeed steps its optimizers in parts, so the Trainer's step count is used.
        self._by_hand = "DeepSpeed" in type(trainer.strategy).__name__
        self._last = trainer.global_step
        self.record.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if self._by_hand and trainer.global_step > self._last:
            self._last = trainer.global_step
            self.record.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.record.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.record.finish(exception)


def RecordActual(**options: Any) -> Any:
    """A callback for the distribution of Lightning that the program uses."""
    bases = [sys.modules[name].Callback for name in CALLBACKS if name in sys.modules]
    if not bases:
        import lightning.pytorch.callbacks.callback as callbacks

        bases = [callbacks.Callback]
    return type("RecordActual", (Recording, *bases), {})(**options)
