"""Recognizes DeepSpeed in a model: the class that wraps it, and parameters that ZeRO-3 partitioned. Does not import DeepSpeed."""

from __future__ import annotations

from typing import Any

WRAPPERS = {"DeepSpeedEngine": "deepspeed"}


def whole_shape(parameter: Any) -> tuple[tuple[int, ...], str] | None:
    """The unsharded shape of a parameter, and what shards it; None if DeepSpeed does not."""
    whole = getattr(parameter, "ds_shape", None)
    return None if whole is None else (tuple(whole), "zero3")
