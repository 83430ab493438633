"""Maya in Hugging Face Trainer and accelerate: scripts run as they are under `maya run`; for those who prefer code there is
MayaCallback."""

from typing import TYPE_CHECKING, Any

__all__ = ["MayaCallback"]

if TYPE_CHECKING:
    from maya_huggingface.callback import MayaCallback


def __getattr__(name: str) -> Any:
    # Every emulated process loads this package (hooks.py): transformers may come only with what needs it.
    if name == "MayaCallback":
        from maya_huggingface.callback import MayaCallback

        return MayaCallback
    raise AttributeError(f"module 'maya_huggingface' has no attribute '{name}'")
