"""Products and attention of inductor's Triton templates, relative to the libraries' kernels of the same sizes.

The libraries' kernels were measured (gemm, attention); how much longer Triton's take was not. Each factor states its source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maya_core.ops import kernel
from maya_core.ops.kernel import Columns
from maya_core.predictor import attention_time, gemm_time
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.family import Family, by_model

# The share of the library's speed that a product reaches with its best tile, by compute capability. Estimated, not measured: close to cuBLAS
# on Ampere; a template makes less use of the asynchronous instructions of Hopper and Blackwell than the library.
SHARE_OF_LIBRARY = {7: 0.85, 8: 0.9, 9: 0.75, 10: 0.7, 12: 0.85}
# FlexAttention reaches 0.90 of FlashAttention-2 forward and 0.85 backward on A100 ("FlexAttention", pytorch.org, 2024).
ATTENTION_SLOWER = (1 / 0.90, 1 / 0.85)  # forward, backward
# The cost of a tile's loads relative to its multiplications, which grow with its rows and columns. Estimated, not measured.
LOADS = 24.0


class TritonProducts(Family[kernel.TritonGemm]):
    """The library's product of the same size, slowed by factors for Triton's compiler and for the tile."""

    name, title, compute_bound = "triton_gemm", "matrix products (Triton)", True

    def predict(self, kernels: Sequence[kernel.TritonGemm]) -> Durations:
        return by_model(kernels, self._of_dtype)

    def _of_dtype(self, dtype: str, kernels: list[kernel.TritonGemm]) -> Durations:
        those = Columns(kernels)
        library = gemm_time.price_either(self.target, dtype, those)
        tiles = np.maximum(np.ceil(those.m / those.tile_m) * np.ceil(those.n / those.tile_n) * those.batch, 1)
        waste = (
            tiles * those.tile_m * those.tile_n / np.maximum(those.m * those.n * those.batch, 1)
        )  # for lanes outside the matrix
        waves = np.ceil(tiles / self.gpu.sms) / (tiles / self.gpu.sms)  # the last one is not full
        loads = 1 + LOADS * (1 / those.tile_m + 1 / those.tile_n) / 2
        pipeline = 1 + 0.1 * np.maximum(0, 3 - those.stages)  # loads that the kernel waits for
        # accumulators that do not fit in registers
        fullest = np.where(those.tile_m * those.tile_n / (those.warps * 32) > 128, 1.3, 1.0)
        best = 1 + LOADS / 128
        share = SHARE_OF_LIBRARY.get(self.gpu.compute_capability[0], 0.8)
        slower = 1 / share * np.maximum(1.0, waste * waves) * loads / best * pipeline * fullest
        found = library.slowed(slower, Provenance.EXTRAPOLATED)
        by_traffic = those.traffic / self.gpu.memory_bandwidth_bytes_per_s
        return Durations(np.maximum(found.seconds, by_traffic), found.provenance, found.profile, found.profiles)


class TritonAttentions(Family[kernel.TritonAttention]):
    name, title, compute_bound = "triton_attention", "attention (Triton)", True

    def predict(self, kernels: Sequence[kernel.TritonAttention]) -> Durations:
        return by_model(kernels, self._one_way)

    def _one_way(self, model: str, kernels: list[kernel.TritonAttention]) -> Durations:
        those = Columns(kernels)
        slower = ATTENTION_SLOWER[model.endswith("backward")] * those.share
        return attention_time.price(self.target, model, those).slowed(slower, Provenance.EXTRAPOLATED)
