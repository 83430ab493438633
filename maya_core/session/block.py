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
from maya_core.device.visible import VARIABLE as VISIBLE
from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, hardware_file_in_use
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.progress import JobProgress
from maya_core.launch.rerun import program_again
from maya_core.launch.run import without_secrets
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World
from maya_core.messages import say
from maya_core.overlay import files as overlay
from maya_core.recording.steps import StopProgram
from maya_core.report.prediction import Prediction
from maya_core.report.written_files import written_files
from maya_core.request import Request
from maya_core.session.emulation import Emulation
from maya_core.trace.job import JobTrace, collate, read_traces, write_manifest
from maya_core.trace.memory_peaks import devices_used
from maya_core.trace.rank import RankTrace
from maya_core.trace.run_folder import new_run


def emulate(
    gpu: str = DEFAULT_GPU, *, rank: int = 0, rerun: bool = False, steps: int | None = None, **options: Any
) -> EmulatedBlock:
    """Runs a block of code on emulated GPUs, in this process:

        with maya_core.emulate("h100", gpus_per_node=8) as job:
            train()
        print(job.prediction)

    The options are those of `maya run`, with underscores: gpus_per_node, network, tokens_per_step and so on. With `nodes`, the block is rank
    `rank` of a world with one rank per GPU, and finds the environment that torchrun would give it. `steps` ends the block after that many
    optimizer steps; without, it runs to its end. With `out`, the job is kept in a new folder there, `job.folder`. With `rerun`, ranks that it exchanges messages with run
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
        if request.keep_files and request.out is None:
            raise MayaError("keep_files=True: there is no folder to keep them in.", "Give out=, a folder for runs.")
        self.request = request
        self._settings = ProcessSettings(
            request=request, gpus=gpus, rank=rank, world_size=world.size, machine_visible=os.environ.get(VISIBLE)
        )
        self._environment = world.environment(rank) if request.nodes else {}
        self._rerun = rerun
        self._command = without_secrets(program_again() or [])
        self._until_end = ExitStack()
        self._emulation: Emulation | None = None
        self._job: JobTrace | None = None
        self._overlay: Path | None = None
        self.folder: Path | None = None  # where the job is kept, if there was an `out`
        self.files: list[overlay.Written] = []  # that the block wrote; they are not where it wrote them

    def __enter__(self) -> EmulatedBlock:
        settings, request = self._settings, self.request
        with ExitStack() as stack:
            stack.enter_context(hardware_file_in_use(request.hardware))
            if request.out is not None:
                kept = new_run(request.out, self._command, request.gpu_name, request.name)
                self.folder = stack.enter_context(kept).path
                settings = settings.model_copy(update={"folder": self.folder.resolve()})
            if self._rerun:
                aside = settings.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maya-")))
                progress = stack.enter_context(JobProgress(settings.request.steps))
                coordinator = stack.enter_context(Coordinator(on_step=progress.step))
                settings = settings.model_copy(update={"folder": aside, "coordinator": coordinator.socket})
            self._emulation = Emulation(settings)
            self._cover_files(stack, settings)
            if self._emulation.link is not None:
                stack.callback(self._emulation.link.close)
            self._until_end = stack.pop_all()
        for name, value in self._environment.items():
            self._emulation.device.patches.put(os.environ, name, value)
        return self

    def _cover_files(self, stack: ExitStack, settings: ProcessSettings) -> None:
        """What the block writes goes to an overlay, until the emulation ends. Under `maya run` it does already."""
        if overlay.is_on():
            return
        self._overlay = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maya-")), "overlay")
        own = [each for each in (settings.folder, settings.coordinator and settings.coordinator.parent) if each]
        variables = overlay.environment(self._overlay, own)
        patches = self.emulation.device.patches
        patches.on_undo(overlay.start(variables))
        for name, value in variables.items():
            patches.put(os.environ, name, value)

    def _end_overlay(self) -> None:
        """Tells what the block has written, and keeps it if the user wants it."""
        if self._overlay is None:
            return
        self.files = overlay.written(self._overlay)
        kept = self.folder / overlay.KEPT if self.request.keep_files and self.folder is not None else None
        if kept is not None:
            overlay.keep(self._overlay, kept)
        if self.files:
            say(written_files(self.files, kept).replace("The", "the", 1))

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
            folder = self._emulation.settings.folder
            self._job = collate(read_traces(folder) if others is not None and folder is not None else [trace])
            if self.folder is not None:
                write_manifest(self.folder, self.job)
            self._end_overlay()
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
        return replace(
            job,
            world_size=world,
            gpus_per_node=per_node,
            nodes=-(-world // per_node),
            command=self._command,
            node=self.request.node,
            network=self.request.network,
        )

    @cached_property
    def prediction(self) -> Prediction:
        """Step time, throughput, memory and cost."""
        with hardware_file_in_use(self.request.hardware):
            return pipeline.predict(self.job, self.request)
