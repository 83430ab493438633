"""Estimates the GPU memory that NCCL allocates for a communicator at its first call, outside PyTorch's allocator.

Reported figures: on A100 with NVLink, 544 MiB for a group of two ranks and 688 MiB for larger ones (NVIDIA/nccl issue 964), which
is 2.4 and 3 connections for each of 24 channels; "about 1.6 GB" for a group across nodes, and 6 GB for several of them (issue 864).
NCCL 2.22 and later connects only what is used, so a job may use less than the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from maya_core.hardware.models import Gpu

MIB = 2**20
# The FIFOs of the three protocols: Simple 4 MiB (NCCL_BUFFSIZE), LL128 4.7 MiB, LL 0.5 MiB.
CONNECTION_BYTES = int(9.44 * MIB)
NVLINK_CHANNELS, PCIE_CHANNELS = 24, 4
PAIR, GROUP = 2.4, 3.0  # connections per channel, in a group of two and in larger ones
ACROSS_NODES = 2  # times as much: the network has buffers of its own beside those of NVLink


@dataclass(frozen=True)
class Buffers:
    gpu: Gpu
    gpus_per_node: int

    def bytes(self, ranks: list[int]) -> int:
        """The bytes that a communicator of these global ranks uses on each of its GPUs."""
        if len(ranks) < 2:
            return 0
        channels = NVLINK_CHANNELS if self.gpu.nvlink_bytes_per_s else PCIE_CHANNELS
        connections = PAIR if len(ranks) == 2 else GROUP
        across = ACROSS_NODES if len({rank // self.gpus_per_node for rank in ranks}) > 1 else 1
        return int(channels * connections * across * CONNECTION_BYTES) // (2 * MIB) * 2 * MIB
