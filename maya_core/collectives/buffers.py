"""The GPU memory NCCL takes for a communicator at its first call, beside PyTorch's allocator.

An estimate. Groups of NVLinked A100 were seen to take 544 MiB with two ranks and 688 MiB with more (NVIDIA/nccl issue 964), which
is 2.4 and 3 connections for each of 24 channels; "about 1.6 GB" where nodes take part, and 6 GB for several such (issue 864).
NCCL from 2.22 on connects what is used only, so a job may take less, not more.
"""

from __future__ import annotations

from dataclasses import dataclass

from maya_core.hardware.models import Gpu

MIB = 2**20
# The FIFOs of the three protocols: Simple 4 MiB (NCCL_BUFFSIZE), LL128 4.7 MiB, LL 0.5 MiB.
CONNECTION_BYTES = int(9.44 * MIB)
NVLINK_CHANNELS, PCIE_CHANNELS = 24, 4
PAIR, GROUP = 2.4, 3.0  # connections of a channel
ACROSS_NODES = 2  # the network's buffers are apart from those of NVLink


@dataclass(frozen=True)
class Buffers:
    gpu: Gpu
    gpus_per_node: int

    def bytes(self, ranks: list[int]) -> int:
        """What a communicator of these global ranks takes on each of its GPUs."""
        if len(ranks) < 2:
            return 0
        channels = NVLINK_CHANNELS if self.gpu.nvlink_bytes_per_s else PCIE_CHANNELS
        connections = PAIR if len(ranks) == 2 else GROUP
        across = ACROSS_NODES if len({rank // self.gpus_per_node for rank in ranks}) > 1 else 1
        return int(channels * connections * across * CONNECTION_BYTES) // (2 * MIB) * 2 * MIB
