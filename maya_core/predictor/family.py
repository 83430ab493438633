"""The interface of a kernel family, and what all families receive: the GPU and its fitted models."""

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
    """The GPU for which durations are predicted, with options."""

    gpu: Gpu
    burst: bool = False  # the clocks of a GPU that was idle before, instead of those under load
    attention: str = DEFAULT_ATTENTION  # the generation of kernels behind torch's flash attention
    _ready: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def find(self, family: str, choices: Sequence[str]) -> tuple[Found, str] | None:
        """The first of the models for which this GPU has measurements, otherwise the one of the nearest relative."""
        found = [(each, model) for model in choices if (each := find_profile(family, self.gpu, model)) is not None]
        return min(found, key=lambda pair: (not pair[0].own, distance(self.gpu, pair[0].gpu)), default=None)

    def fitted(self, found: Found, model: str, dtype: str, build: Callable[[dict[str, Any]], Fitted]) -> Fitted:
        """A profile's model for this GPU, built once."""
        key = (found.name, model, dtype)
        if key not in self._ready:
            self._ready[key] = build(found.profile.models[model])
        made: Fitted = self._ready[key]
        return made

    def bound(self, dtype: str, flops: np.ndarray) -> Durations:
        """A lower bound from the data sheet, if nothing similar was measured."""
        return Durations.of(flops / peak_flops(self.gpu, dtype), Provenance.BOUND, "data sheet")


class Family(Generic[K]):
    """The kernels that one class predicts. Reports, calibrations and power use these attributes, so they are defined once, here."""

    name: ClassVar[str]
    title: ClassVar[str]  # the name for people
    compute_bound: ClassVar[bool] = False  # it multiplies: clocks, power and compute factors change its duration
    precedence: ClassVar[int] = 0  # an op with kernels of several families counts for the family with the highest value

    def __init__(self, target: Target) -> None:
        self.target = target
        self.gpu = target.gpu

    def predict(self, kernels: Sequence[K]) -> Durations:
        raise NotImplementedError


def by_model(kernels: Sequence[K], price: Callable[[str, list[K]], Durations]) -> Durations:
    """Predicts kernels model by model, each in one batch, and restores their order."""
    groups: dict[str, list[int]] = {}
    for place, kernel in enumerate(kernels):
        groups.setdefault(kernel.model, []).append(place)
    return in_order([(places, price(model, [kernels[place] for place in places])) for model, places in groups.items()])


def in_order(parts: Sequence[tuple[Sequence[int] | np.ndarray, Durations]]) -> Durations:
    """Combines the results of parts of a batch, each with the places of its kernels, into one result."""
    joined = Durations.joined([durations for _, durations in parts])
    if len(parts) == 1:
        return joined
    return joined.taken(np.argsort(np.concatenate([np.asarray(places) for places, _ in parts]), kind="stable"))


def known(seconds: np.ndarray, inside: np.ndarray, found: Found) -> Durations:
    """INTERPOLATED where measurements of this GPU surround the sizes, EXTRAPOLATED elsewhere."""
    provenance = np.where(inside & found.own, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED)
    return Durations.of(seconds, provenance.astype(np.uint8), found.name)


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """The data sheet's rate for a dtype, or for its substitute if the GPU does not support it."""
    for name in (dtype, {"bfloat16": "float32", "tf32": "float32", "float8": "bfloat16"}.get(dtype, "float32")):
        if name in gpu.peak_flops:
            return gpu.peak_flops[name]
    return gpu.peak_flops["float32"]
