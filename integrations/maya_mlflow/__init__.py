"""Maya for MLflow: logs predictions next to the real runs they predicted, compares them, and corrects later predictions.

    maya run --mlflow -- python train.py            # a predicted run
    with maya_mlflow.record_actual(): train()       # the actual one, on the real GPUs, under the same keys
    maya compare --experiment NAME                  # the pairs
    maya calibrate --from-mlflow NAME               # corrects later predictions

MLflow is imported only when it is needed, and never into the process of a training.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["record_actual"]

if TYPE_CHECKING:
    from maya_mlflow.recorder import record_actual


def __getattr__(name: str) -> Any:
    # Every emulated process loads this package (hooks.py), whether or not it uses MLflow.
    if name == "record_actual":
        from maya_mlflow.recorder import record_actual

        return record_actual
    if name in ("lightning", "huggingface"):  # their RecordActual callbacks
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'maya_mlflow' has no attribute '{name}'")
