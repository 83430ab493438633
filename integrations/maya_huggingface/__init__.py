"""Maya for Hugging Face Trainer and accelerate. Scripts run unchanged under `maya run`; MayaCallback emulates from inside a script."""

from typing import TYPE_CHECKING, Any

__all__ = ["MayaCallback"]

if TYPE_CHECKING:
    from maya_huggingface.callback import MayaCallback


def __getattr__(name: str) -> Any:
    # Every emulated process loads this package (hooks.py), so it must not import transformers.
    if name == "MayaCallback":
        from maya_huggingface.callback import MayaCallback

        return MayaCallback
    raise AttributeError(f"module 'maya_huggingface' has no attribute '{name}'")
