"""Chooses the tile configuration of a kernel. Inductor would time each on the GPU; here, an estimate of how busy it keeps the GPU decides."""

from __future__ import annotations

import math
from typing import Any

from maya_core.hardware.catalog import Gpu

THREADS = 32  # in a warp
BLOCKS_PER_SM = 32
# Loads that an SM must have in flight to hide the latency of DRAM: 3.35 TB/s times 600 ns over 132 SMs are 15 KiB; twice that.
BYTES_IN_FLIGHT = 32 * 1024


def best(gpu: Gpu, tuner: Any) -> Any:
    """The tuner's configuration with the lowest `cost`; the first one among equals."""
    configs = tuner.configs
    tuner._maya_configs = len(configs)
    sizes = tuner.size_hints
    if len(configs) == 1 or not isinstance(sizes, dict):
        return configs[0]
    return min(configs, key=lambda config: cost(gpu, sizes, config.kwargs, config.num_warps))


def cost(gpu: Gpu, numels: dict[str, int], blocks: dict[str, Any], warps: int) -> float:
    """The duration of a memory-bound kernel, relative to its duration on a GPU that is busy all the time.

    It accounts for the last wave of blocks, which does not fill the SMs, for lanes of tiles beyond the end of the data, and for the
    loads in flight, which must be enough to hide the latency of memory.
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
    in_flight = 4 * tile * min(resident, max(1.0, programs / gpu.sms))
    return wasted * idle * max(1.0, BYTES_IN_FLIGHT / in_flight)
