"""The shape of a job: its nodes, one rank per GPU, and the environment that a launcher gives each rank."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Nodes with the same number of ranks each. Ranks are numbered node by node."""

    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    def environment(self, rank: int, address: str = "127.0.0.1", port: int = 29500) -> dict[str, str]:
        """The variables that torchrun's agent sets for a worker."""
        node, local = divmod(rank, self.ranks_per_node)
        environment = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "GROUP_RANK": node,
            "ROLE_RANK": rank,
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "WORLD_SIZE": self.size,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_WORLD_SIZE": self.size,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if self.ranks_per_node > 1:
            environment["OMP_NUM_THREADS"] = os.getenv("OMP_NUM_THREADS", "1")
        return {name: str(value) for name, value in environment.items()}
