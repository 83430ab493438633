"""8-bit and 4-bit training, refused by name; and what Megatron asks of it in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maya_core.errors import MayaError


def refusal(what: str) -> MayaError:
    return MayaError(
        f"{what} of Transformer Engine is not emulated: the time of its kernels is not known.",
        "Emulate with --bf16 and without --fp8-format or --fp4-format: an upper bound of time, and nearly the same memory.",
    )


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> Any:
        raise refusal("FP8")

    is_fp8_calibration = is_fp8_enabled


@contextmanager
def fp8_autocast(enabled: bool = True, **_: Any) -> Iterator[None]:
    if enabled:
        raise refusal("FP8")
    yield


class Recipe:
    """Of any kind of scaling."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise refusal(type(self).__name__)


class DelayedScaling(Recipe):
    pass


def not_emulated(name: str) -> type:
    """A class that Megatron may look at, and not make one of."""

    def init(self: Any, *_: Any, **__: Any) -> None:
        raise MayaError(
            f"{name} of Transformer Engine is not emulated.", "Switch the option of Megatron's off that asks for it."
        )

    return type(name, (), {"__init__": init})
