"""All fitted families, in an order in which each comes after those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from maya_core.predictor.fitting import (
    attention_profiles,
    collective_fit,
    convolution_profiles,
    gemm_profiles,
    recurrent_profiles,
    streaming_fit,
)
from maya_core.predictor.fitting.splits import Line
from maya_core.predictor.profile import Profile

FAMILIES: dict[str, Callable[..., Iterator[tuple[Profile, list[Line]]]]] = {
    "gemm": gemm_profiles.fit,
    "attention": attention_profiles.fit,
    "convolution": convolution_profiles.fit,
    "recurrent": recurrent_profiles.fit,  # needs the GEMM profiles
    "memory": streaming_fit.fit,
    "collectives": collective_fit.fit,
}
