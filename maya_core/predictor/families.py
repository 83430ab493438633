"""All families of kernels, by name. A new one needs a class, a line here, and one in `KERNELS` of ops/kernel.py."""

from __future__ import annotations

from typing import Any

from maya_core.predictor.attention_time import FusedAttention
from maya_core.predictor.convolution_time import Convolutions
from maya_core.predictor.copy_time import Copies
from maya_core.predictor.family import Family
from maya_core.predictor.gemm_time import GroupedProducts, Products
from maya_core.predictor.given import IncludedKernels, TimedKernels
from maya_core.predictor.recurrent_time import RecurrentLayers
from maya_core.predictor.streaming_time import GeneratedKernels, MemoryBound, UnknownKernels
from maya_core.predictor.template_time import TritonAttentions, TritonProducts

FAMILIES: dict[str, type[Family[Any]]] = {
    family.name: family
    for family in (
        Products, GroupedProducts, FusedAttention, Convolutions, RecurrentLayers, MemoryBound, GeneratedKernels, TritonProducts,
        TritonAttentions, Copies, IncludedKernels, UnknownKernels, TimedKernels,
    )
}  # fmt: skip
COMMUNICATION = "communication"  # which is predicted by call, not by kernel


def title(name: str) -> str:
    """The name of a family for people."""
    return FAMILIES[name].title if name in FAMILIES else name.replace("_", " ")
