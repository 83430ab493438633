"""What a family of kernels is to the predictor, and what all families are given: the GPU, and the fitted models of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from maya_core.hardware.models import Gpu
from maya_core.ops.kernel import Kernel
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.profile import Found, distance, find_profile

K = TypeVar("K", bound=Kernel)
Fitted = TypeVar("Fitted")


@dataclass
class Target:
    """The GPU to price for, and how."""

    gpu: Gpu
    burst: bool = False  # clocks of a GPU that was idle before, instead of those under load
    attention: str = DEFAULT_ATTENTION  # which generation runs behind torch's flash attention
    _ready: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def find(self, family: str, choices: Sequence[str]) -> tuple[Found, str] | None:
        """The first choice this GPU has measurements of; else the nearest relative's, whichever choice that is."""
        found = [(each, model) for model in choices if (each := find_profile(family, self.gpu, model)) is not None]
        return min(found, key=lambda pair: (not pair[0].own, distance(self.gpu, pair[0].gpu)), default=None)

    def fitted(self, found: Found, model: str, dtype: str, build: Callable[[dict[str, Any]], Fitted]) -> Fitted:
        """A profile's model put together for this GPU, once."""
        key = (found.name, model, dtype)
        if key not in self._ready:
            self._ready[key] = build(found.profile.models[model])
        made: Fitted = self._ready[key]
        return made

    def bound(self, dtype: str, flops: np.ndarray) -> Durations:
        """A lower bound by the data sheet, where nothing like it was measured."""
        return Durations.of(flops / peak_flops(self.gpu, dtype), Provenance.BOUND, "data sheet")


class Family(Generic[K]):
    """Kernels that one class prices. Reports, calibrations and power read the attributes, so they are said once, here."""

    name: ClassVar[str]
    title: ClassVar[str]  # as people read it
    compute_bound: ClassVar[bool] = (
        False  # multiplies: its time goes with clocks and power, and a compute factor is for it
    )
    telling: ClassVar[int] = 0  # of an op with kernels of several families, the one of most is what the op is known for

    def __init__(self, target: Target) -> None:
        self.target = target
        self.gpu = target.gpu

    def predict(self, kernels: Sequence[K]) -> Durations:
        raise NotImplementedError


def by_model(kernels: Sequence[K], price: Callable[[str, list[K]], Durations]) -> Durations:
    """Prices kernels model by model, each as one batch, and puts the answers back in order."""
    groups: dict[str, list[int]] = {}
    for place, kernel in enumerate(kernels):
        groups.setdefault(kernel.model, []).append(place)
    return in_order([(places, price(model, [kernels[place] for place in places])) for model, places in groups.items()])


def in_order(parts: Sequence[tuple[Sequence[int] | np.ndarray, Durations]]) -> Durations:
    """Answers to parts of a batch, each with the places its kernels have there, as one answer to the batch."""
    joined = Durations.joined([durations for _, durations in parts])
    if len(parts) == 1:
        return joined
    return joined.taken(np.argsort(np.concatenate([np.asarray(places) for places, _ in parts]), kind="stable"))


def known(seconds: np.ndarray, inside: np.ndarray, found: Found) -> Durations:
    """Interpolated where measurements of this very GPU surround the sizes, extrapolated elsewhere."""
    provenance = np.where(inside & found.own, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED)
    return Durations.of(seconds, provenance.astype(np.uint8), found.name)


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """The data sheet's rate for a dtype, or for what stands in for it where the GPU lacks it."""
    for name in (dtype, {"bfloat16": "float32", "tf32": "float32", "float8": "bfloat16"}.get(dtype, "float32")):
        if name in gpu.peak_flops:
            return gpu.peak_flops[name]
    return gpu.peak_flops["float32"]
