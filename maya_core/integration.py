"""All that the integration of a framework sees of an emulation.

An integration is a package with one entry point, a function that receives an `Integration` in every emulated process:

    [project.entry-points."maya.integrations"]
    myframework = "maya_myframework.hooks:install"

    def install(integration: Integration) -> None:
        integration.patches.supports("myframework")
        integration.patches.when_imported("myframework.trainer", functools.partial(_trainer, integration))

Every change to the framework goes through `integration.patches` (framework_patches.py), which undoes it when the emulation ends. `supports`
names a project, whose versions are those that the package requires of it; with others, the user is told. docs/architecture.md follows an
example.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from maya_core.collectives.exchange import Exchange, Peers
from maya_core.device.emulated import EmulatedDevice
from maya_core.framework_patches import FrameworkPatches, Ranges, checked_versions
from maya_core.hardware.models import Gpu
from maya_core.launch.link import Link
from maya_core.launch.ranks import RankLauncher, RankProcess, RankSetting
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World
from maya_core.messages import Notes
from maya_core.ops.rules import Rules
from maya_core.patches import Patches, first_of
from maya_core.recording.batches import BatchRecord, batch_size, length_of
from maya_core.recording.checkpoints import Checkpoints
from maya_core.recording.evaluations import EvaluationLoop, EvaluationRun, Evaluations
from maya_core.recording.model_state import ModelState
from maya_core.recording.module_paths import on_device
from maya_core.recording.skipped import Skipped
from maya_core.recording.steps import StepCounter, StopProgram
from maya_core.request import Request
from maya_core.trace.schema import Category

__all__ = [
    "BatchRecord",
    "Category",
    "EvaluationLoop",
    "EvaluationRun",
    "Evaluations",
    "FrameworkPatches",
    "Integration",
    "ModelState",
    "Patches",
    "RankLauncher",
    "RankProcess",
    "RankSetting",
    "Rules",
    "StopProgram",
    "World",
    "batch_size",
    "emulating",
    "first_of",
    "length_of",
    "on_device",
]

GROUP = "maya.integrations"


class Emulated(Protocol):
    """The emulation behind an `Integration`."""

    settings: ProcessSettings
    device: EmulatedDevice
    steps: StepCounter
    batches: BatchRecord
    evaluations: Evaluations
    checkpoints: Checkpoints
    skipped: Skipped
    notes: Notes
    exchange: Exchange
    log: dict[str, dict[str, Any]]
    link: Link | None
    rank: int | None
    world_size: int
    owns_process: bool

    def grow(self, gpus: int) -> None: ...
    def become_world(self, world: World) -> None: ...


class Integration:
    """The emulation of this process, for the integration of a framework."""

    def __init__(self, emulation: Emulated, checked: Ranges | None = None) -> None:
        """`checked` are the versions of projects that the integration was checked on; none for a plugin that the program itself creates."""
        self._emulation = emulation
        # Changes to other projects, undone when the emulation ends.
        self.patches = FrameworkPatches(emulation.device.patches, checked or {}, emulation.notes)
        self.steps: StepCounter = emulation.steps  # what counts as a training step, and when the program stops
        self.batches: BatchRecord = emulation.batches  # samples and tokens that the program trains on
        self.evaluations: Evaluations = emulation.evaluations  # what evaluation does to memory, and how long it takes
        self.checkpoints: Checkpoints = emulation.checkpoints  # what is not written, because nothing was computed
        self.rules: Rules = emulation.device.rules  # what ops return, where a package brings ops of its own
        # Lines of the framework's own log with places for predicted times, by name (report/framework_log.py).
        self.log: dict[str, dict[str, Any]] = emulation.log

    # ---- the request, the GPUs and the world ----
    @property
    def request(self) -> Request:
        """What the user asked for, of `maya run` or of a plugin."""
        return self._emulation.settings.request

    @property
    def gpu(self) -> Gpu:
        return self._emulation.device.gpu

    @property
    def gpus(self) -> int:
        """GPUs that are visible to the program."""
        return self._emulation.device.gpus

    @property
    def given_gpus(self) -> int | None:
        """The GPUs of a node that the user or a launcher has asked for; None if nobody has."""
        return self._emulation.settings.gpus

    def grow(self, gpus: int) -> None:
        """The program has said how many GPUs its node has."""
        self._emulation.grow(gpus)

    @property
    def rank(self) -> int | None:
        """None until the program joins a process group."""
        return self._emulation.rank

    @property
    def world_size(self) -> int:
        return self._emulation.world_size

    def become_world(self, world: World) -> None:
        """The program asks for that world and starts its ranks itself: this process becomes rank 0, and others run when they are needed."""
        self._emulation.become_world(world)

    def needs_rank(self, rank: int) -> None:
        """This rank will exchange messages with that one, which must be emulated as well."""
        self._emulation.exchange.meet(rank)

    @property
    def launcher(self) -> RankLauncher | None:
        """Starts the ranks of a launcher's job; None in a program that launches nothing."""
        link = self._emulation.link
        return RankLauncher(link, self._emulation.settings) if link is not None else None

    @property
    def peers(self) -> Peers | None:
        """The other emulated ranks, to exchange values with; None if this rank is emulated alone."""
        return self._emulation.link

    @property
    def owns_process(self) -> bool:
        """Whether the process ends with the emulation. A process of the user's own continues after it."""
        return self._emulation.owns_process

    # ---- tensors, and work that the framework's own code would do ----
    def label(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Counts the memory of these tensors as parameters, gradients, optimizer state or buffers."""
        self._emulation.device.native.label(tensors, category)

    def host_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor on the device, where they are known."""
        value: torch.Tensor | None = self._emulation.device.native.host_value(tensor)
        return value

    def record_call(self, op: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Records a call of an op that is not run."""
        self._emulation.device.native.record_call(op, inputs, outputs)

    def record_host_work(self, bytes_moved: int) -> None:
        """Records that the host reads and writes this many bytes, which it does not do under emulation."""
        self._emulation.device.native.record_host_work(bytes_moved)

    def event_count(self) -> int:
        """How many events have been recorded so far."""
        return int(self._emulation.device.native.event_count())

    def synchronize_current_stream(self, device: int) -> None:
        """Records that the host waits for the device's current stream."""
        self._emulation.device.native.synchronize_current_stream(device)

    def not_the_program(self, *folders: str) -> None:
        """Lines of code in these folders are not the user's program: their allocations count for the line that called them."""
        self._emulation.device.pass_over(*folders)

    # ---- messages ----
    def skip(self, what: str) -> None:
        """Tells the user once, from rank 0, that something is not done under emulation."""
        self._emulation.skipped.report(what)


def emulating() -> bool:
    """Whether an emulation is on in this process."""
    return EmulatedDevice.current is not None


def install_all(emulation: Emulated) -> None:
    """Lets every installed integration watch for its framework."""
    for entry in entry_points(group=GROUP):
        install = entry.load()
        # Lines of an integration are never the program's.
        emulation.device.pass_over(os.path.dirname(inspect.getfile(install)))
        requirements = entry.dist.requires if entry.dist is not None else None
        install(Integration(emulation, checked_versions(requirements)))
