"""FP8 as programs request it: recipes, and the context in which layers follow one. The tensors are in quantized.py. FP4 is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from maya_core.errors import MayaError
from maya_megatron.engine.device import device, launch


class Format(Enum):
    """The formats of forward and backward."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)


class Recipe:
    """How tensors are scaled to FP8. Megatron calls these methods to find out the kind of recipe."""

    kind = ""

    def __init__(
        self,
        margin: float = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        reduce_amax: bool = True,
        override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
        **_: Any,
    ) -> None:
        if fp8_dpa or fp8_mha:
            raise refusal(
                "attention in eight bits", "Leave --fp8-dot-product-attention and --fp8-multi-head-attention out"
            )
        if any(override_linear_precision):
            raise refusal("FP8 without its weight gradients", "Leave --no-fp8-wgrad out")
        self.fp8_format, self.amax_history_len, self.reduce_amax = fp8_format, amax_history_len, reduce_amax
        self.fp8_dpa, self.fp8_mha = fp8_dpa, fp8_mha

    def delayed(self) -> bool:
        return self.kind == "delayed"

    def float8_current_scaling(self) -> bool:
        return self.kind == "current"

    def float8_block_scaling(self) -> bool:
        return self.kind == "block"

    def float8_per_tensor_scaling(self) -> bool:
        return self.kind in ("delayed", "current")

    def mxfp8(self) -> bool:
        return self.kind == "mxfp8"

    def nvfp4(self) -> bool:
        return False

    custom = nvfp4


class DelayedScaling(Recipe):
    """Scales by the largest values of earlier steps."""

    kind = "delayed"


class Float8CurrentScaling(Recipe):
    """Scales by the largest value of the tensor itself."""

    kind = "current"


class Float8BlockScaling(Recipe):
    """Scales by the largest value of each block of 128 numbers, or 128 x 128 for weights."""

    kind = "block"

    def __init__(self, fp8_format: Format = Format.E4M3, **others: Any) -> None:
        super().__init__(fp8_format=fp8_format, **others)


class MXFP8BlockScaling(Recipe):
    """Scales by the largest value of 32 numbers, with powers of two: Blackwell's own format."""

    kind = "mxfp8"

    def __init__(self, fp8_format: Format = Format.E4M3, **others: Any) -> None:
        if device().transposes:
            raise MayaError(
                "MXFP8 needs a GPU of compute capability 10.",
                "Emulate one that has it (--gpu b200), or take --fp8-recipe tensorwise.",
            )
        super().__init__(fp8_format=fp8_format, **others)


def refused_recipe(name: str) -> type:
    def init(self: Any, *_: Any, **__: Any) -> None:
        raise refusal(name, "Take a recipe of --fp8-recipe instead, or train in 16 bits")

    return type(name, (Recipe,), {"__init__": init})


def refusal(what: str, instead: str) -> MayaError:
    return MayaError(f"{what} of Transformer Engine is not emulated.", f"{instead}.")


@dataclass
class Autocast:
    """The settings inside `fp8_autocast`, and inside `fp8_model_init` for new parameters."""

    enabled: bool = False
    recipe: Any = None
    group: Any = None
    depth: int = 0
    at_first_layer: bool = False
    recomputes: bool = False  # whether the present forward will run again for its backward
    recipe_of_parameters: Any = None


_now = Autocast()


def autocast() -> Autocast:
    return _now


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return _now.enabled

    @staticmethod
    def is_fp8_calibration() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> Any:
        return _now.recipe or DelayedScaling()

    @staticmethod
    def get_fp8_group() -> Any:
        return _now.group

    @staticmethod
    def with_fp8_parameters() -> bool:
        return _now.recipe_of_parameters is not None

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        return device().has_eight_bits, "Device compute capability 8.9 or higher required for FP8 execution."

    @staticmethod
    def set_skip_fp8_weight_update_tensor(skip: bool) -> None:
        """Used by CUDA graphs."""


@contextmanager
def _changed(**state: Any) -> Iterator[None]:
    before = copy.copy(vars(_now))
    vars(_now).update(state)
    try:
        yield
    finally:
        vars(_now).update(before)


@contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, **_: Any
) -> Iterator[None]:
    if enabled and not device().has_eight_bits:
        raise MayaError(
            "this GPU has no products in eight bits: FP8 needs compute capability 8.9.",
            "Emulate a GPU that has them (--gpu h100), or train in 16 bits.",
        )
    outermost = _now.depth == 0
    state = dict(enabled=enabled, recipe=fp8_recipe or DelayedScaling(), group=fp8_group, depth=_now.depth + 1)
    first = True if outermost else _now.at_first_layer
    with _changed(**state, at_first_layer=first):
        yield
        first = _now.at_first_layer
    _now.at_first_layer = first
    if enabled and outermost and torch.is_grad_enabled():
        update_scales(forward=True)


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    with _changed(recipe_of_parameters=(recipe or DelayedScaling()) if enabled else None):
        yield


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    with _changed(recomputes=activation_recompute and not recompute_phase):
        yield


def first_layer() -> bool:
    """Whether this is the first layer of the context. Its backward runs last and ends with new scales for gradients."""
    first = _now.at_first_layer
    _now.at_first_layer = False
    return first


@dataclass(frozen=True)
class Histories:
    """The history of the largest values of a layer's tensors, and their scales. Only used by delayed scaling."""

    scales: torch.Tensor
    amaxes: torch.Tensor
    group: Any
    reduced: bool
    forward: bool = field(default=True)


def histories(recipe: Recipe, tensors: int, forward: bool) -> Histories:
    made = Histories(
        torch.ones(tensors, dtype=torch.float32, device="cuda"),
        torch.zeros(recipe.amax_history_len, tensors, dtype=torch.float32, device="cuda"),
        _now.group,
        recipe.reduce_amax,
        forward,
    )
    device().histories.append(made)
    return made


def update_scales(forward: bool) -> None:
    """Updates the scales of all layers at once: reduces the largest values over ranks, then runs one kernel."""
    mine = [one for one in device().histories if one.forward == forward]
    for group in dict.fromkeys(one.group for one in mine):
        of_group = [one for one in mine if one.group is group]
        newest = torch.cat([one.amaxes[0] for one in of_group])
        if of_group[0].reduced and dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
        launch("amax_and_scale_update", [newest, [one.amaxes for one in of_group]], [one.scales for one in of_group])


def not_emulated(name: str) -> type:
    """A class that Megatron may inspect, but not instantiate."""

    def init(self: Any, *_: Any, **__: Any) -> None:
        raise MayaError(
            f"{name} of Transformer Engine is not emulated.", "Switch the option of Megatron's off that asks for it."
        )

    return type(name, (), {"__init__": init})
