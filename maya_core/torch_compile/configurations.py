"""Which tile configuration of a kernel runs: where inductor would try each on the GPU, the one that keeps it busiest by count."""

from __future__ import annotations

import math
from typing import Any

from maya_core.hardware.catalog import Gpu

THREADS = 32  # of a warp
BLOCKS_PER_SM = 32
BYTES_IN_FLIGHT = (
    32 * 1024
)  # an SM's share of what hides DRAM's latency: 3.35 TB/s times 600 ns over 132 SMs are 15 KiB; twice that


def best(gpu: Gpu, tuner: Any) -> Any:
    """Of the tuner's configurations, the first of those with the least `cost`."""
    configs = tuner.configs
    tuner._maya_configs = len(configs)
    sizes = tuner.size_hints
    if len(configs) == 1 or not isinstance(sizes, dict):
        return configs[0]
    return min(configs, key=lambda config: cost(gpu, sizes, config.kwargs, config.num_warps))


def cost(gpu: Gpu, numels: dict[str, int], blocks: dict[str, Any], warps: int) -> float:
    """Time of a kernel that moves bytes, in units of itself on a GPU that is busy all the time.

    Waves of blocks over the SMs, the last of which is not full; lanes of tiles that lie outside; loads under way, which have to be
    enough to hide the latency of memory.
    """
    programs, tile, wasted = 1, 1, 1.0
    for axis, numel in numels.items():
        size = blocks.get(f"{axis.rstrip('_').upper()}BLOCK") or blocks.get(f"{axis.upper()}BLOCK")
        if size is None:
            continue
        parts = math.ceil(max(numel, 1) / size)
        wasted *= parts * size / max(numel, 1)
        tile *= min(size, max(numel, 1))
        if not axis.startswith("r"):
            programs *= parts
    resident = max(1, min(BLOCKS_PER_SM, gpu.max_threads_per_sm // (warps * THREADS)))
    waves = programs / (gpu.sms * resident)
    idle = math.ceil(waves) / waves if waves > 1 else 1 / max(min(1.0, programs / gpu.sms), 1e-9)
    under_way = 4 * tile * min(resident, max(1.0, programs / gpu.sms))
    return wasted * idle * max(1.0, BYTES_IN_FLIGHT / under_way)
