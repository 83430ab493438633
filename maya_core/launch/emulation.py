"""An emulation in this process: the device, its record, module names and steps, and what came of it."""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

import maya_core
from maya_core.collectives import face as distributed
from maya_core.collectives.buffers import Buffers
from maya_core.collectives.exchange import Exchange
from maya_core.collectives.record import CollectiveRecord
from maya_core.collectives.stores import LocalKeys
from maya_core.device.emulated import EmulatedDevice
from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu
from maya_core.launch import checkpoints, spawn
from maya_core.launch.data import DataRecord
from maya_core.launch.link import Link
from maya_core.launch.modules import ModulePaths
from maya_core.launch.settings import Settings
from maya_core.launch.steps import StepCounter, StopProgram
from maya_core.launch.world import World
from maya_core.trace.job import trace_path
from maya_core.trace.rank import RankTrace, write_trace
from maya_core.trace.schema import EVENT, Kind, Phase

if TYPE_CHECKING:
    from maya_core.report.prediction import Prediction


class Emulation:
    """The emulated device switched on. `finish` switches it off and gives the trace."""

    def __init__(self, settings: Settings, on_step: Callable[[int], None] | None = None) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.world_size = settings.world_size
        self.device = EmulatedDevice(find_gpu(settings.gpu), settings.gpus or 1)
        self.modules = ModulePaths(self.device.native)
        self.link = Link(settings.coordinator, frozenset(settings.chosen)) if settings.coordinator else None
        self.steps = StepCounter(self.device.native, settings.steps, on_step or (self.link.step if self.link else None))
        self.data = DataRecord(self.device.native)
        self.collectives = CollectiveRecord()
        self.exchange = Exchange(
            self.device.native, self.collectives, self.link, Buffers(self.device.gpu, self.device.gpus)
        )
        self.trace: RankTrace | None = None
        self.forked = False
        self.modules.put_on(self.device.patches)
        self.device.where = self.modules.where
        self.steps.put_on(self.device.patches)
        self.data.put_on(self.device.patches)
        keys = self.link or LocalKeys()
        distributed.put_on(self.device.native, self.exchange, keys, self._join_world, self.device.patches)
        checkpoints.put_on(self.device.native, self.device.patches)
        if self.link is not None:
            spawn.put_on(self.link, settings, self.device.patches)
        if self.rank is not None:
            self._join_world(self.rank, self.world_size)
        self.device.native.start_recording()

    def _join_world(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        if self.link is not None:
            self.link.rank(rank)

    def go_on_in_fork(self) -> None:
        """This process is a fork of the emulated one: a rank of its own, with a record of its own."""
        self.forked = True
        self.rank = None
        self.steps.restart()
        self.data.restart()
        self.collectives.clear()
        if self.link is not None:
            self.link.reconnect()
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
        backward = np.flatnonzero((record["kind"] == Kind.OP) & (record["phase"] == Phase.BACKWARD))
        events = _with_step_ends(record, self.steps.ends, cut=self.steps.enough)
        gpu = self.device.gpu
        self.trace = RankTrace(
            meta={
                "maya": maya_core.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "gpu": gpu.name,
                "gpus": self.device.gpus,
                "gpu_memory_bytes": gpu.memory_bytes,
                "outside_allocator_bytes": gpu.outside_bytes,
                "nccl_bytes": self.exchange.buffer_bytes,
                "rank": self.rank or 0,
                "world_size": self.world_size,
                "ended": ended,
                "steps": len(self.steps.ends),
                "alloc_retries": [s["num_alloc_retries"] for s in stats],
                "stand_ins": self.exchange.stand_ins,
                "hung": hung,
                "data": self.data.by_step(self.steps.ends, backward),
                "idle_optimizers": self.steps.idle,
            },
            events=events,
            signatures=self.device.planner.signatures,
            modules=list(self.modules.names),
            streams=native.streams(),
            communicators=self.collectives.communicators,
            calls=self.collectives.calls,
            sites=self.collectives.sites,
            lines=native.lines(),
        )
        if not self.forked:  # a fork is about to end, and has no threads to undo things with
            self.device.remove()
        # A process that only started the ranks has nothing to tell.
        if self.settings.out is not None and (
            self.rank is not None or np.isin((Kind.OP, Kind.OUT_OF_MEMORY), events["kind"]).any()
        ):
            self.settings.out.mkdir(parents=True, exist_ok=True)
            write_trace(trace_path(self.settings.out, self.rank or 0), self.trace)
        return self.trace


def _with_step_ends(events: np.ndarray, ends: list[int], cut: bool) -> np.ndarray:
    """The record with the ends of steps put in; what came after the last step asked for is left out."""
    marks = np.zeros(len(ends), EVENT)
    marks["kind"] = Kind.STEP_END
    marks["a"] = np.arange(1, len(ends) + 1)
    for name in ("time_ns", "stream", "device", "phase"):
        marks[name] = [events[name][end - 1] if end else 0 for end in ends]
    marked = np.insert(events, ends, marks)
    return marked[: ends[-1] + len(ends)] if cut and ends else marked


class emulate:
    """Runs a block of code on emulated GPUs, in this process:

        with maya_core.emulate("h100") as job:
            train()
        print(job.prediction)

    `gpus` of a node are there. With `nodes`, the block is rank `rank` of a world with one rank per GPU, and finds the
    environment torchrun would give it. `steps` ends the block after that many optimizer steps; `out` is a folder for
    the trace.
    """

    def __init__(
        self,
        gpu: str = DEFAULT_GPU,
        *,
        gpus: int = 1,
        nodes: int | None = None,
        rank: int = 0,
        steps: int | None = None,
        out: str | Path | None = None,
    ) -> None:
        find_gpu(gpu)
        world = World(nodes or 1, gpus if nodes else 1)
        if not 0 <= rank < world.size:
            raise MayaError(
                f"rank={rank}: the world has {world.size} ranks.", "Give nodes=, gpus= and a rank of theirs."
            )
        if gpus < 1 or gpus > 64:
            raise MayaError(
                f"gpus={gpus} cannot be emulated in one process.", "Give a number from 1 to 64: the GPUs of one node."
            )
        self._settings = Settings(
            gpu=gpu,
            gpus=gpus,
            steps=steps,
            out=None if out is None else Path(out),
            rank=rank,
            world_size=world.size,
        )
        self._environment = world.environment(rank) if nodes else {}
        self._emulation: Emulation | None = None

    def __enter__(self) -> emulate:
        self._emulation = Emulation(self._settings)
        for name, value in self._environment.items():
            self._emulation.device.patches.put(os.environ, name, value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        assert self._emulation is not None
        stopped = isinstance(error, StopProgram)
        if (
            stopped
        ):  # what the program held goes while there is a device to give it back to, not with the traceback later
            traceback.clear_frames(where)
        self._emulation.finish("completed" if error is None else "stopped" if stopped else "failed")
        return stopped

    @property
    def trace(self) -> RankTrace:
        """What was asked of the device; there once the block has ended."""
        if self._emulation is None or self._emulation.trace is None:
            raise MayaError("the emulation has not ended yet.", "Read `trace` and `prediction` after the `with` block.")
        return self._emulation.trace

    @cached_property
    def prediction(self) -> Prediction:
        """Step time, throughput, memory, cost. A block is one rank: others are taken to run in lockstep with it."""
        from maya_core.hardware.cluster import cluster
        from maya_core.report.analysis import Options
        from maya_core.report.predict import predict
        from maya_core.trace.job import collate
        from maya_core.trace.memory import devices_used

        job = collate([self.trace])
        world = job.world_size if job.world_size > 1 else max(1, len(devices_used(self.trace)))
        per_node = min(world, self._settings.gpus or 1)
        job = replace(job, world_size=world, gpus_per_node=per_node, nodes=-(-world // per_node))
        machine = cluster(self.trace.meta["gpu"], job.gpus_per_node, job.nodes)
        return predict(job, machine, Options().calibrated(machine.gpu))
