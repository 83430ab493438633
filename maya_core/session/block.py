"""An emulation around a block of code, in a process that lives on."""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.progress import JobProgress
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World
from maya_core.recording.steps import StopProgram
from maya_core.session.emulation import Emulation
from maya_core.trace.job import JobTrace, collate, read_traces
from maya_core.trace.memory_peaks import devices_used
from maya_core.trace.rank import RankTrace

if TYPE_CHECKING:
    from maya_core.report.prediction import Prediction


class emulate:
    """Runs a block of code on emulated GPUs, in this process:

        with maya_core.emulate("h100") as job:
            train()
        print(job.prediction)

    `gpus` of a node are there. With `nodes`, the block is rank `rank` of a world with one rank per GPU, and finds the
    environment torchrun would give it. `steps` ends the block after that many optimizer steps; `out` is a folder for
    the trace. With `rerun`, ranks that it exchanges messages with run this process's command again, as the frameworks do that
    start their own processes; else they are taken to be in lockstep with it.
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
        rerun: bool = False,
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
        self._settings = ProcessSettings(
            gpu=gpu,
            gpus=gpus,
            steps=steps,
            out=None if out is None else Path(out),
            rank=rank,
            world_size=world.size,
        )
        self._environment = world.environment(rank) if nodes else {}
        self._rerun = rerun
        self._until_end = ExitStack()
        self._emulation: Emulation | None = None
        self._job: JobTrace | None = None

    def __enter__(self) -> emulate:
        settings = self._settings
        with ExitStack() as stack:
            if self._rerun:
                out = settings.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maya-")))
                progress = stack.enter_context(JobProgress(settings.steps))
                coordinator = stack.enter_context(Coordinator(on_step=progress.step))
                settings = settings.model_copy(update={"out": out, "coordinator": coordinator.socket})
            self._emulation = Emulation(settings)
            if self._emulation.link is not None:
                stack.callback(self._emulation.link.close)
            self._until_end = stack.pop_all()
        for name, value in self._environment.items():
            self._emulation.device.patches.put(os.environ, name, value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        assert self._emulation is not None
        stopped = isinstance(error, StopProgram)
        if stopped:
            # What the program held goes while there is a device to give it back to, not with the traceback later.
            traceback.clear_frames(where)
        with self._until_end:
            trace = self._emulation.finish("completed" if error is None else "stopped" if stopped else "failed")
            others = self._emulation.others
            folder = self._emulation.settings.out
            self._job = collate(read_traces(folder) if others is not None and folder is not None else [trace])
        return stopped

    @property
    def emulation(self) -> Emulation:
        """The emulation itself; there once the block has begun."""
        assert self._emulation is not None
        return self._emulation

    @property
    def trace(self) -> RankTrace:
        """What was asked of the device; there once the block has ended."""
        if self._emulation is None or self._emulation.trace is None:
            raise MayaError("the emulation has not ended yet.", "Read `trace` and `prediction` after the `with` block.")
        return self._emulation.trace

    @cached_property
    def job(self) -> JobTrace:
        """The traces of this rank and of those it needed; the others are taken to run in lockstep with it."""
        trace, job = self.trace, self._job
        assert job is not None
        world = job.world_size if job.world_size > 1 else max(1, len(devices_used(trace)))
        per_node = min(world, int(trace.meta["ranks_per_node" if job.world_size > 1 else "gpus"]))
        return replace(job, world_size=world, gpus_per_node=per_node, nodes=-(-world // per_node))

    @cached_property
    def prediction(self) -> Prediction:
        """Step time, throughput, memory, cost."""
        from maya_core.report.analysis import Options
        from maya_core.report.summary import predict
        from maya_core.report.what_if import recorded_cluster

        machine = recorded_cluster(self.job)
        return predict(self.job, machine, Options().calibrated(machine.gpu))
