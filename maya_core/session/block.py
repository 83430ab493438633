"""An emulation around a block of code, in a process that continues afterwards."""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from maya_core import pipeline
from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, hardware_file_in_use
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.progress import JobProgress
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World
from maya_core.recording.steps import StopProgram
from maya_core.report.prediction import Prediction
from maya_core.request import Request
from maya_core.session.emulation import Emulation
from maya_core.trace.job import JobTrace, collate, read_traces
from maya_core.trace.memory_peaks import devices_used
from maya_core.trace.rank import RankTrace


def emulate(
    gpu: str = DEFAULT_GPU, *, rank: int = 0, rerun: bool = False, steps: int | None = None, **options: Any
) -> EmulatedBlock:
    """Runs a block of code on emulated GPUs, in this process:

        with maya_core.emulate("h100", gpus_per_node=8) as job:
            train()
        print(job.prediction)

    The options are those of `maya run`, with underscores: gpus_per_node, network, tokens_per_step and so on. With `nodes`, the block is rank
    `rank` of a world with one rank per GPU, and finds the environment that torchrun would give it. `steps` ends the block after that many
    optimizer steps; without, it runs to its end. `out` is a folder for the trace. With `rerun`, ranks that it exchanges messages with run
    this process's command again, as frameworks do that start their own processes; without, they are assumed to be in lockstep with it.
    """
    if ignored := sorted({"json", "html"} & options.keys()):
        raise MayaError(
            f"maya_core.emulate writes no files, so {ignored[0]}= would do nothing.",
            "After the block, write `job.prediction.model_dump_json()` to a file. `maya run` and the plugins write pages, too.",
        )
    return EmulatedBlock(Request.of(gpu=gpu, steps=steps, **options), rank=rank, rerun=rerun)


class EmulatedBlock:
    """A block of code on emulated GPUs: use it in a `with` statement, and read its `prediction` afterwards."""

    def __init__(self, request: Request, *, rank: int = 0, rerun: bool = False) -> None:
        with hardware_file_in_use(request.hardware):
            request.check()
        gpus = request.gpus_per_node or 1
        world = World(request.nodes or 1, gpus if request.nodes else 1)
        if not 0 <= rank < world.size:
            raise MayaError(
                f"rank={rank}: the world has {world.size} ranks.", "Give nodes=, gpus_per_node= and one of their ranks."
            )
        self.request = request
        self._settings = ProcessSettings(request=request, gpus=gpus, rank=rank, world_size=world.size)
        self._environment = world.environment(rank) if request.nodes else {}
        self._rerun = rerun
        self._until_end = ExitStack()
        self._emulation: Emulation | None = None
        self._job: JobTrace | None = None

    def __enter__(self) -> EmulatedBlock:
        settings = self._settings
        with ExitStack() as stack:
            stack.enter_context(hardware_file_in_use(self.request.hardware))
            if self._rerun:
                out = settings.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maya-")))
                progress = stack.enter_context(JobProgress(settings.request.steps))
                coordinator = stack.enter_context(Coordinator(on_step=progress.step))
                request = self.request.model_copy(update={"out": out})
                settings = settings.model_copy(update={"request": request, "coordinator": coordinator.socket})
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
            # Frees what the program held while there is a device to free it on, not later with the traceback.
            traceback.clear_frames(where)
        with self._until_end:
            trace = self._emulation.finish("completed" if error is None else "stopped" if stopped else "failed")
            others = self._emulation.others
            folder = self._emulation.settings.out
            self._job = collate(read_traces(folder) if others is not None and folder is not None else [trace])
        return stopped

    @property
    def emulation(self) -> Emulation:
        """The emulation itself, once the block has begun."""
        assert self._emulation is not None
        return self._emulation

    @property
    def trace(self) -> RankTrace:
        """The calls that the block made of its GPU, once it has ended."""
        if self._emulation is None or self._emulation.trace is None:
            raise MayaError("the emulation has not ended yet.", "Read `trace` and `prediction` after the `with` block.")
        return self._emulation.trace

    @cached_property
    def job(self) -> JobTrace:
        """The traces of this rank and of the ranks that it needed. The others are assumed to run in lockstep with it."""
        trace, job = self.trace, self._job
        assert job is not None
        world = job.world_size if job.world_size > 1 else max(1, len(devices_used(trace)))
        per_node = min(world, int(trace.meta["ranks_per_node" if job.world_size > 1 else "gpus"]))
        return replace(job, world_size=world, gpus_per_node=per_node, nodes=-(-world // per_node))

    @cached_property
    def prediction(self) -> Prediction:
        """Step time, throughput, memory and cost."""
        with hardware_file_in_use(self.request.hardware):
            return pipeline.predict(self.job, self.request)
