"""Products and attention from inductor's Triton templates, against the libraries' kernels for the same sizes.

What the libraries take is measured (gemm, attention). How much longer Triton's take is not: each factor says where it is from.
"""

from __future__ import annotations

import numpy as np

from maya_core.hardware.catalog import Gpu
from maya_core.predictor.durations import Durations

# The library's speed that a product reaches at its best tile, by compute capability. By judgement: close to cuBLAS on Ampere; Hopper's and
# Blackwell's asynchronous instructions are used less well by a template than by the library.
SHARE_OF_LIBRARY = {7: 0.85, 8: 0.9, 9: 0.75, 10: 0.7, 12: 0.85}
# FlexAttention reaches 0.90 of FlashAttention-2 forward and 0.85 backward on A100 ("FlexAttention", pytorch.org, 2024).
ATTENTION_SLOWER = (1 / 0.90, 1 / 0.85)  # forward, backward
# What a tile's loads cost against its multiplications, which grow with its rows and its columns: by judgement.
LOADS = 24.0


def gemm(gpu: Gpu, library: Durations, dtype: str, sizes: np.ndarray) -> Durations:
    batch, m, n, _, _, tile_m, tile_n, _, warps, stages, traffic = sizes.T
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch
    waste = tiles * tile_m * tile_n / (m * n * batch)  # of lanes outside the matrix
    waves = np.ceil(tiles / gpu.sms) / (tiles / gpu.sms)  # the last one is not full
    loads = 1 + LOADS * (1 / tile_m + 1 / tile_n) / 2
    pipeline = 1 + 0.1 * np.maximum(0, 3 - stages)  # loads that are waited for
    crowded = np.where(tile_m * tile_n / (warps * 32) > 128, 1.3, 1.0)  # accumulators that no longer fit in registers
    best = 1 + LOADS / 128
    share = SHARE_OF_LIBRARY.get(gpu.compute_capability[0], 0.8)
    by_arithmetic = library.seconds / share * np.maximum(1.0, waste * waves) * loads / best * pipeline * crowded
    by_traffic = traffic / gpu.memory_bandwidth_bytes_per_s
    return Durations(np.maximum(by_arithmetic, by_traffic), library.provenance, library.profile, library.profiles)
