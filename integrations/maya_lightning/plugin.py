"""The plugin for Lightning. It is a ClusterEnvironment, which tells Lightning the rank of this process and the size of the world. The
other changes to Lightning are in hooks.py."""

from __future__ import annotations

import os
import sys
from types import ModuleType, TracebackType
from typing import Any

from maya_core.errors import MayaError
from maya_core.integration import World
from maya_core.report.prediction import Prediction
from maya_core.request import Request, plugin_signature
from maya_core.session.plugin import PluginSession


class MayaEmulator:
    """Emulates what a Trainer or Fabric trains, in this process, and predicts what it does to real GPUs.

        emulator = MayaEmulator("h100", nodes=8, gpus_per_node=8)
        Trainer(strategy="fsdp", plugins=[emulator]).fit(model)
        emulator.prediction

    The emulation is on from here to the end of `fit`. Without `nodes` and `gpus_per_node`, the Trainer's own `num_nodes` and `devices` are
    used. Put a training loop of your own (with Fabric, for example) into a `with emulator:` block; without one, the emulation ends with
    the script. The other arguments are the options of `maya run`, with underscores: `help(MayaEmulator)` lists them.
    """

    def __init__(self, gpu: str | None = None, **options: Any) -> None:
        self.session = PluginSession("MayaEmulator", gpu=gpu, **options)
        self.world: World | None = None  # set when a Trainer or a Fabric is created with it
        self.session.begin()

    @property
    def request(self) -> Request:
        """The options that are in use."""
        return self.session.request

    @property
    def prediction(self) -> Prediction:
        """The prediction, once the training has ended."""
        if self.session.prediction is None:
            raise MayaError(
                "there is no prediction yet.",
                "It is available after `trainer.fit`; under `maya run`, the command prints it and writes it to --out.",
            )
        return self.session.prediction

    def __enter__(self) -> MayaEmulator:
        self.session.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        return self.session.end(error)

    # ---- the interface of a ClusterEnvironment; with several ranks, the environment variables of a launcher are set ----
    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", 29500))

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", 1))

    def global_rank(self) -> int:
        return int(os.environ.get("RANK", 0))

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.world_size():
            raise MayaError(
                f"devices={num_devices} and num_nodes={num_nodes} do not match a world of {self.world_size()} ranks.",
                "Give the Trainer the same numbers as the command that starts the ranks.",
            )

    def teardown(self) -> None:
        pass


MayaEmulator.__init__.__signature__ = plugin_signature()  # type: ignore[attr-defined]


def take_as_environment(module: ModuleType) -> None:
    """Registers the plugin as a ClusterEnvironment. Each distribution of Lightning has its own class."""
    module.ClusterEnvironment.register(MayaEmulator)


for name in ("lightning.fabric", "lightning_fabric"):  # LightningCLI checks the class before it creates an instance
    if found := sys.modules.get(f"{name}.plugins.environments.cluster_environment"):
        take_as_environment(found)
