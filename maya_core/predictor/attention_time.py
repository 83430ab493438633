"""Fused attention, forward and backward: flash, memory-efficient and cuDNN kernels.

Structure: each block of queries processes the keys that it attends to. Blocks are distributed over the SMs, and a launch takes at least as
long as its longest block. Causal attention and windows reduce the keys, in whole tiles. Added to that are the traffic of queries, keys, values
and outputs, and a floor. Every term grows with every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from maya_core.hardware.models import Gpu
from maya_core.ops import kernel
from maya_core.ops.kernel import Columns
from maya_core.predictor.attention_kind import SLOWER_THAN_FLASH2
from maya_core.predictor.durations import Durations
from maya_core.predictor.family import Family, Target, by_model, known, peak_flops
from maya_core.predictor.gemm_time import SHARPNESS
from maya_core.predictor.lattice import Lattice, StoredLattice, Surface, knot_sizes

QUERY_TILE, KEY_TILE = 128, 128
HEAD_TILE = 64  # head dimensions are rounded up to multiples of this
GROWTH = (
    2.0,
    1.0,
    1.0,
    0.0,
)  # exponents of the growth with queries, heads, head dimension and key heads, where all of them are large
BACKWARD_MULTIPLICATIONS = 2.5  # backward multiplies five matrices where forward multiplies two


class AttentionStructure(BaseModel):
    """Coefficients: shares of the data sheet's rates, and times in microseconds."""

    model_config = ConfigDict(extra="forbid")

    efficiency: float  # of the tensor cores' peak, at head dimension 128
    head_exponent: float  # efficiency grows with the head dimension to this power, up to 128
    block_us: float  # start and end of a block of queries
    tile_us: float  # per tile of keys: the softmax between the multiplications
    floor_us: float
    memory_share: float

    def seconds(
        self, gpu: Gpu, batch: np.ndarray, heads: np.ndarray, kv_heads: np.ndarray, queries: np.ndarray,
        keys: np.ndarray, head: np.ndarray, value_head: np.ndarray, causal: np.ndarray, window: np.ndarray,
        *, multiplications: float = 1.0, passes: float = 1.0,
    ) -> np.ndarray:  # fmt: skip
        blocks = batch * heads * np.ceil(queries / QUERY_TILE)
        longest, average = seen_keys(queries, keys, causal, window)
        padded = (np.maximum(head, HEAD_TILE) + np.maximum(value_head, HEAD_TILE)) / 2
        rate = (
            peak_flops(gpu, "float16") / gpu.sms * self.efficiency * np.minimum(padded / 128, 1) ** self.head_exponent
        )
        tile = 4 * QUERY_TILE * KEY_TILE * padded * multiplications / rate + self.tile_us * 1e-6
        waves = np.maximum(blocks / gpu.sms, 1)
        compute = waves * (average / KEY_TILE * tile + self.block_us * 1e-6)
        slowest = longest / KEY_TILE * tile + self.block_us * 1e-6
        moved = 2 * batch * (heads * queries * (head + value_head) + kv_heads * keys * (head + value_head))
        memory = passes * moved / (gpu.memory_bandwidth_bytes_per_s * self.memory_share)
        bounds = compute**SHARPNESS + slowest**SHARPNESS + memory**SHARPNESS
        answer: np.ndarray = bounds ** (1 / SHARPNESS) + self.floor_us * 1e-6
        return answer


def seen_keys(
    queries: np.ndarray, keys: np.ndarray, causal: np.ndarray, window: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys for the last block of queries and for an average block, in whole tiles."""
    longest = np.ceil(keys / KEY_TILE) * KEY_TILE
    diagonal = np.minimum(queries, keys)
    # A causal triangle over the last `diagonal` keys, in tiles; all queries attend to the keys before it.
    triangle = np.maximum(keys - diagonal, 0) + (np.ceil(diagonal / KEY_TILE) + 1) / 2 * KEY_TILE
    average = np.where(causal > 0, np.minimum(triangle, longest), longest)
    reach = np.where(window > 0, np.ceil(window / KEY_TILE) * KEY_TILE + KEY_TILE, np.inf)
    return np.minimum(longest, reach), np.minimum(average, reach)


class AttentionModel(BaseModel):
    model_config = ConfigDict(extra="forbid")

    structure: AttentionStructure
    correction: StoredLattice  # over queries, batch x heads, head dimension, batch x key heads; causal, no window
    windowed: StoredLattice | None = None  # an additional correction where a window hides keys
    multiplications: float = 1.0  # in multiples of the forward pass
    passes: float = 1.0  # over the tensors

    def structural(self, gpu: Gpu, *sizes: np.ndarray) -> np.ndarray:
        return self.structure.seconds(gpu, *sizes, multiplications=self.multiplications, passes=self.passes)

    def plain(self, gpu: Gpu, queries: np.ndarray, many: np.ndarray, head: np.ndarray, few: np.ndarray) -> np.ndarray:
        """The structural time of causal self-attention, for which the grid is made."""
        one = np.ones_like(queries)
        return self.structural(gpu, one, many, few, queries, queries, head, head, one, 0 * one)


def points(
    batch: np.ndarray, heads: np.ndarray, kv_heads: np.ndarray, queries: np.ndarray, head: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The coordinates of attention on a model's grid."""
    return queries, batch * heads, (head + value) / 2, batch * kv_heads


class FittedAttention:
    """A fitted model for a GPU. Structure and correction are combined once, at the knots."""

    def __init__(self, stored: AttentionModel | dict[str, Any], gpu: Gpu) -> None:
        self.model = stored if isinstance(stored, AttentionModel) else AttentionModel.model_validate(stored)
        self.gpu = gpu
        self.known = correction = Lattice.load(self.model.correction)
        self.surface = Surface.of(self.model.plain(gpu, *knot_sizes(correction.axes)), correction, growth=GROWTH)
        self.windowed = Lattice.load(self.model.windowed) if self.model.windowed else None

    def seconds(
        self, batch: Any, heads: Any, kv_heads: Any, queries: Any, keys: Any, head: Any, value_head: Any,
        causal: Any = 1, window: Any = 0,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Returns seconds, and whether measurements surround the shape."""
        given = (batch, heads, kv_heads, queries, keys, head, value_head, causal, window)
        sizes = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, float)) for size in given))
        empty = np.prod(sizes[:7], axis=0) <= 0
        batch, heads, kv_heads, queries, keys, head, value_head = (np.maximum(size, 1) for size in sizes[:7])
        causal, window = sizes[7:]
        place = points(batch, heads, kv_heads, queries, head, value_head)
        seconds, inside = self.surface(*place), self.known(*place)[1]
        other = (causal == 0) | (keys != queries) | (window > 0)
        if other.any():  # scaled by the ratio of its structural time to that of the plain case
            exact = self.model.structural(
                self.gpu, batch, heads, kv_heads, queries, keys, head, value_head, causal, window
            )
            seconds = np.where(other, seconds * exact / self.model.plain(self.gpu, *place), seconds)
            hidden = (window > 0) & (window < keys)
            inside = inside & (~other | hidden)
            if self.windowed is not None:
                factor, backed = self.windowed(*place)
                seconds, inside = np.where(hidden, seconds * factor, seconds), np.where(hidden, backed, inside)
        return np.where(empty, 0.0, seconds), inside


# The measured kernel that represents torch's. flash is FlashAttention-2; cuDNN's was not published, and TensorRT-LLM's is similar.
MODELS = {
    "flash_forward": ("flash2", "fused"),
    "flash_backward": ("flash2 backward", "fused backward"),
    "cudnn_forward": ("fused", "flash3"),
    "cudnn_backward": ("fused backward", "flash2 backward"),
    "efficient_forward": ("flash2", "fused"),
    "efficient_backward": ("flash2 backward", "fused backward"),
}
# CUTLASS's memory-efficient kernels relative to FlashAttention-2: 1.6 forward and 2 backward at lengths of 1k to 8k in the figures
# of the FlashAttention-2 paper (A100, xformers); not measured elsewhere.
SLOWER_THAN_FLASH = {"efficient_forward": 1.6, "efficient_backward": 2.0}


def price(target: Target, model: str, those: Columns) -> Durations:
    """Durations of attention with one backend and direction, which the kernel's model names."""
    gpu = target.gpu
    if (found := target.find("attention", MODELS[model])) is None:
        return target.bound("bfloat16", 4 * those.batch * those.heads * those.queries * those.keys * those.head)
    profile, measured = found
    attention = target.fitted(profile, measured, "", lambda stored: FittedAttention(stored, gpu))
    seconds, inside = attention.seconds(
        those.batch, those.heads, those.kv_heads, those.queries, those.keys, those.head, those.value_head, those.causal, those.window
    )  # fmt: skip
    slower = SLOWER_THAN_FLASH.get(model, 1.0)
    if model.startswith("flash"):
        slower = SLOWER_THAN_FLASH2[target.attention][model.endswith("backward")]
    single = peak_flops(gpu, "float16") / peak_flops(gpu, "tf32")  # float32 runs on TF32 tensor cores
    seconds = seconds * slower * np.where(those.item_bytes > 2, single, 1.0)
    return known(seconds, inside & (slower == 1.0) & (those.item_bytes <= 2), profile)


class FusedAttention(Family[kernel.Attention]):
    name, title, compute_bound = "attention", "attention", True

    def predict(self, kernels: Sequence[kernel.Attention]) -> Durations:
        return by_model(kernels, lambda model, those: price(self.target, model, Columns(those)))
