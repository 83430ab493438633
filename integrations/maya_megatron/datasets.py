"""Makes Megatron's datasets work under emulation. Rank 0 writes the indices of a dataset to a cache; the others wait at a barrier and
read them. Barriers do not block emulated ranks, so here the others wait for rank 0 itself. The index of mock data is in memory and
would need more than a hundred GiB for a whole training; a few steps only need its beginning."""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import Any

from maya_core.integration import Integration

MOST_SAMPLES = 2**24  # of mock data, if only some steps are run: an index of 1 GiB


def install(integration: Integration) -> None:
    patches, peers, turns = integration.patches, integration.peers, itertools.count()

    def mock(module: ModuleType) -> None:
        original = module.BlendedMegatronDatasetBuilder.__init__

        @functools.wraps(original)
        def init(self: Any, cls: Any, sizes: list[int | None], is_built_on_rank: Any, config: Any) -> None:
            if config.mock and integration.steps.limit is not None:
                sizes = [size and min(size, MOST_SAMPLES) for size in sizes]
            original(self, cls, sizes, is_built_on_rank, config)

        patches.set(module.BlendedMegatronDatasetBuilder, "__init__", init)

    patches.when_imported("megatron.core.datasets.blended_megatron_dataset_builder", mock)
    if peers is None:  # this rank is emulated alone
        return

    def builder(module: ModuleType) -> None:
        original = module.BlendedMegatronDatasetBuilder.build

        @functools.wraps(original)
        def build(self: Any) -> Any:
            turn = f"megatron/datasets/{next(turns)}"
            if integration.rank:
                peers.want(turn, 0, "indices of a dataset")
                return original(self)
            built = original(self)
            peers.post(turn, b"")
            return built

        patches.set(module.BlendedMegatronDatasetBuilder, "build", build)

    patches.when_imported("megatron.core.datasets.blended_megatron_dataset_builder", builder)
