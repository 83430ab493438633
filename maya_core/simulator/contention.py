"""How much communication slows compute that runs beside it: NCCL's kernels occupy SMs, and its data uses the same memory."""

from __future__ import annotations

from maya_core.hardware.cluster import Cluster
from maya_core.predictor.placement import Placement

# SMs that NCCL occupies, one for each channel: 24 within a node of A100 with NVLink, fewer where links are slower.
NVLINK_CHANNELS, OTHER_CHANNELS = 24, 8
# Bytes through the GPU's memory for each byte of the buffer: received data is written, and read to be passed on. With this value,
# FSDP on eight A100 loses 0.44 s of compute to a second of communication, as published runs show.
TRAFFIC = 2.0
MOST = 0.8  # of compute is lost, however much communication runs


def pressure(placement: Placement, cluster: Cluster, bytes_per_s: float) -> float:
    """The share of a GPU's compute that is lost while a group moves `bytes_per_s`."""
    if placement.ranks == 1:
        return 0.0
    within = placement.islands == 1 and placement.link == "nvlink"
    channels = NVLINK_CHANNELS if within else OTHER_CHANNELS
    memory = TRAFFIC * bytes_per_s / cluster.gpu.memory_bandwidth_bytes_per_s
    return min(MOST, channels / cluster.gpu.sms + memory)
