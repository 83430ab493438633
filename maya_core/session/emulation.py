"""An emulation in this process: the device, its record, module names and steps, and what came of it."""

from __future__ import annotations

import functools
import inspect
import os
import platform
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch

import maya_core
from maya_core.collectives import shim as distributed
from maya_core.collectives.buffers import Buffers
from maya_core.collectives.collective_record import CollectiveRecord
from maya_core.collectives.exchange import Exchange
from maya_core.collectives.store_keys import LocalKeys
from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu
from maya_core.launch import fork_server
from maya_core.launch.link import Link
from maya_core.launch.rerun import OtherRanks, program_again
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World
from maya_core.recording import checkpoints
from maya_core.recording.batches import DataRecord
from maya_core.recording.files_read import FilesRead
from maya_core.recording.module_paths import ModulePaths
from maya_core.recording.steps import StepCounter
from maya_core.recording.workload import WorkloadRecord
from maya_core.session import spawn
from maya_core.torch_compile import TorchCompile
from maya_core.trace.job import trace_path
from maya_core.trace.rank import RankTrace, write_trace
from maya_core.trace.schema import EVENT, EventKind, Phase

# Entry points: functions that are given the emulation, and watch for the framework they know.
INTEGRATIONS = "maya.integrations"


class Emulation:
    """The emulated device switched on. `finish` switches it off and gives the trace."""

    def __init__(self, settings: ProcessSettings, on_step: Callable[[int], None] | None = None) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.world_size = settings.world_size
        private = settings.coordinator.parent if settings.coordinator else None
        self.device = EmulatedDevice(find_gpu(settings.gpu), settings.gpus or 1, private)
        self.modules = ModulePaths(self.device.native)
        self.link = Link(settings.coordinator, frozenset(settings.chosen)) if settings.coordinator else None
        self.steps = StepCounter(self.device.native, settings.steps, on_step or (self.link.step if self.link else None))
        self.data = DataRecord(self.device.native)
        self.collectives = CollectiveRecord()
        self.ranks_per_node = settings.ranks_per_node or self.device.gpus
        self.device.price_collectives(self._collective_ns)
        self.exchange = Exchange(
            self.device.native, self.collectives, self.link, Buffers(self.device.gpu, self.ranks_per_node)
        )
        self.trace: RankTrace | None = None
        self.forked = False
        self.others: OtherRanks | None = None
        self.files = FilesRead() if settings.note_files else None
        self.log: dict[str, dict[str, Any]] = {}  # the framework's own lines, by name: report/framework_log.py
        torchs_module_call = torch.nn.Module.__call__
        self.modules.install(self.device.patches)
        self.workload = WorkloadRecord(self.modules.watch)  # before the steps, whose last one is not told to others
        self.device.patches.on_undo(lambda: self.workload.close())
        self.device.where = self.modules.where
        self.steps.install(self.device.patches)
        self.data.install(self.device.patches)
        keys = self.link or LocalKeys()
        distributed.install(self.device.native, self.exchange, keys, self._join_world, self.device.patches)
        self.checkpoints = checkpoints.install(self.device.native, self.device.patches)
        self.compile = TorchCompile(self.device, torchs_module_call, lambda: self.steps.under_way)
        if self.link is not None:
            spawn.install(self.link, lambda: self.settings, self.device.patches)
        self._keep_as_found()
        for integration in entry_points(group=INTEGRATIONS):
            install = integration.load()
            self.device.pass_over(os.path.dirname(inspect.getfile(install)))
            install(self)
        if self.rank is not None:
            self._join_world(self.rank, self.world_size)
        self.device.native.start_recording()

    def _collective_ns(self, number: int) -> float:
        """How long a collective takes, for a program that times its GPU."""
        from maya_core.hardware.cluster import cluster
        from maya_core.predictor.pricing import collective_durations

        call = self.collectives.calls[number]
        nodes = -(-self.world_size // self.ranks_per_node)
        machine = cluster(
            self.settings.gpu, self.ranks_per_node, nodes, node=self.settings.node, network=self.settings.network
        )
        group = self.collectives.communicators[call.communicator]
        return float(collective_durations(call, group, machine).seconds[0]) * 1e9

    def _keep_as_found(self) -> None:
        """What frameworks set for a job and leave behind: afterwards it is as it was before."""
        patches = self.device.patches
        patches.on_undo(functools.partial(torch.set_num_threads, torch.get_num_threads()))
        for name in (*World(1, 2).environment(0), "NODE_RANK", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG"):
            patches.keep(os.environ, name)

    def grow(self, gpus: int) -> None:
        """The node has so many GPUs, as the program now tells."""
        self.device.grow(gpus)
        self._place(self.device.gpus)

    def _place(self, ranks_per_node: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.exchange.buffers = Buffers(self.device.gpu, ranks_per_node)

    def become_world(self, world: World) -> None:
        """The program asks for that world, and nobody has started it: this process becomes rank 0, with the environment
        torchrun would give it. Other ranks that turn out to be needed run the same program."""
        self.grow(world.ranks_per_node)
        if world.size == 1:
            return
        self._place(world.ranks_per_node)
        for name, value in world.environment(0).items():
            self.device.patches.put(os.environ, name, value)
        self._join_world(0, world.size)
        command = program_again()
        if self.link is not None and command is not None:
            self.others = OtherRanks(self.link, self.settings, world, command)

    def _join_world(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        if self.link is not None:
            self.link.rank(rank)

    def go_on_in_fork(self, settings: ProcessSettings) -> None:
        """This process is a fork of the emulated one: a rank of its own, with a record of its own."""
        self.forked = True
        self.settings = settings
        if settings.note_files and self.files is None:
            self.files = FilesRead()
        self.rank = None
        self.steps.limit = settings.steps
        self.steps.restart()
        self.data.restart()
        self.workload.close()
        self.workload = WorkloadRecord(self.modules.watch)
        self.collectives.clear()
        self.device.native.forget_collective_calls()
        if self.link is not None:
            self.link.reconnect(settings.coordinator, frozenset(settings.chosen))
            self.steps.on_step = self.link.step
        if settings.rank is not None:  # of another job than the process that was forked
            self.world_size = settings.world_size
            self._place(settings.ranks_per_node or self.device.gpus)
            self._join_world(settings.rank, settings.world_size)
        self.device.native.start_recording()

    def finish(self, ended: str = "completed") -> RankTrace:
        """Takes the record, removes the device, and writes the trace if a folder was given."""
        if self.trace is not None:
            return self.trace
        native = self.device.native
        native.stop_recording()
        self.steps.finish()
        hung = self.link.hung if self.link else ""
        if self.steps.enough:
            ended = "stopped"
        elif hung:
            ended = "hung"
        stats = [native.memory_stats(device) for device in range(self.device.gpus)]
        record = np.frombuffer(native.take_events(), EVENT)
        forward, backward = (
            np.flatnonzero((record["kind"] == EventKind.OP) & (record["phase"] == phase))
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        events = _with_step_ends(record, self.steps.ends, cut=self.steps.enough)
        gpu = self.device.gpu
        self.trace = RankTrace(
            meta={
                "maya": maya_core.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "gpu": gpu.name,
                "gpus": self.device.gpus,
                "ranks_per_node": self.ranks_per_node,
                "gpu_memory_bytes": gpu.memory_bytes,
                "outside_allocator_bytes": gpu.outside_bytes,
                "nccl_bytes": self.exchange.buffer_bytes,
                "rank": self.rank or 0,
                "world_size": self.world_size,
                "ended": ended,
                "steps": len(self.steps.ends),
                "alloc_retries": [s["num_alloc_retries"] for s in stats],
                "stand_ins": self.exchange.stand_ins,
                "assumed_ranks": sorted(self.exchange.assumed),
                "hung": hung,
                "data": self.data.by_step(self.steps.ends, forward, backward),
                "idle_optimizers": self.steps.idle,
                "workload": self.workload.found(),
                "log": self.log,
                "files": self.files.found() if self.files is not None else [],
                "compiled": self.compile.record.found(),
                "asked_gpu": list(self.device.asked_gpu),
            },
            events=events,
            calls=self.device.planner.calls,
            modules=list(self.modules.names),
            streams=native.streams(),
            communicators=self.collectives.communicators,
            collectives=self.collectives.calls,
            sites=[fork_server.below(site) for site in self.collectives.sites],
            lines=native.lines(),
        )
        if not self.forked:  # a fork is about to end, and has no threads to undo things with
            self.device.remove()
        # A process that only started the ranks has nothing to tell.
        if self.settings.out is not None and (
            self.rank is not None or np.isin((EventKind.OP, EventKind.OUT_OF_MEMORY), events["kind"]).any()
        ):
            self.settings.out.mkdir(parents=True, exist_ok=True)
            write_trace(trace_path(self.settings.out, self.rank or 0), self.trace)
        if self.others is not None and self.link is not None:
            self.link.idle(True)
            self.others.wait()
        return self.trace


def _with_step_ends(events: np.ndarray, ends: list[int], cut: bool) -> np.ndarray:
    """The record with the ends of steps put in; what came after the last step asked for is left out."""
    marks = np.zeros(len(ends), EVENT)
    marks["kind"] = EventKind.STEP_END
    marks["a"] = np.arange(1, len(ends) + 1)
    for name in ("time_ns", "stream", "device", "phase"):
        marks[name] = [events[name][end - 1] if end else 0 for end in ends]
    marked = np.insert(events, ends, marks)
    return marked[: ends[-1] + len(ends)] if cut and ends else marked
