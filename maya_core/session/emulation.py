"""An emulation in this process: the device, the collectives, what is recorded beside them, and the trace that results."""

from __future__ import annotations

import functools
import multiprocessing
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maya_core.collectives import shim as collectives_shim
from maya_core.collectives.buffers import Buffers
from maya_core.collectives.collective_record import CollectiveRecord
from maya_core.collectives.exchange import Exchange
from maya_core.collectives.store_keys import LocalKeys
from maya_core.device.emulated import EmulatedDevice
from maya_core.device.visible import VARIABLE as VISIBLE
from maya_core.device.visible import visible_gpus
from maya_core.hardware.catalog import find_gpu
from maya_core.integration import install_all
from maya_core.launch.link import Link
from maya_core.launch.rerun import OtherRanks, program_again
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World
from maya_core.messages import Notes
from maya_core.recording import checkpoints, close_values, torchscript
from maya_core.recording.batches import BatchRecord
from maya_core.recording.data_loading import DataLoadingRecord
from maya_core.recording.evaluations import Evaluations
from maya_core.recording.files_read import FilesRead
from maya_core.recording.module_paths import ModulePaths
from maya_core.recording.rank_differences import RankDifferences, rank_differences
from maya_core.recording.skipped import Skipped
from maya_core.recording.steps import StepCounter
from maya_core.recording.unknown_values import UnknownValues
from maya_core.recording.unread_loaders import UnreadLoaders
from maya_core.recording.workload import WorkloadRecord
from maya_core.session import children, spawn
from maya_core.session.timing import ProgramTiming, collective_seconds
from maya_core.torch_compile import TorchCompile
from maya_core.trace.communication import Site
from maya_core.trace.job import trace_path
from maya_core.trace.processes import write_best
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EVENT, EventKind, Phase
from maya_core.version import __version__

FORK_SERVER = str(Path(__file__).with_name("forked.py"))


class Emulation:
    """The emulated device, switched on. `finish` switches it off and returns the trace."""

    def __init__(
        self, settings: ProcessSettings, on_step: Callable[[int], None] | None = None, owns_process: bool = False
    ) -> None:
        self.settings = settings
        self.owns_process = owns_process  # whether the process ends with the emulation
        self.rank = settings.rank
        self.world_size = settings.world_size
        private = settings.coordinator.parent if settings.coordinator else None
        gpu = find_gpu(settings.request.gpu_name)
        node_gpus = settings.request.gpus_per_node
        self.device = EmulatedDevice(gpu, settings.gpus or 1, private, ProgramTiming(gpu).kernel_seconds, node_gpus)
        self.modules = ModulePaths(self.device.native)
        self.link = (
            Link(settings.coordinator, frozenset(settings.chosen), at_once=not settings.inherited)
            if settings.coordinator
            else None
        )
        if self.link is not None:
            self.link.on_waited = self.device.native.exclude_time
        request = settings.request
        self.notes = Notes(quiet=bool(self.rank))
        self._tell_step = on_step or (self.link.step if self.link else None)
        self.differences: RankDifferences | None = None  # between ranks; None: not looked for
        self.steps = StepCounter(
            self.device.native,
            request.steps,
            self._stepped,
            self.notes.add,
            request.step_at,
            self.device.is_library,
        )
        self.unknown = UnknownValues(
            self.device.native, self.steps, self.device.is_library, request.assume, settings.unknown
        )
        self.loading = DataLoadingRecord(self.device.native)
        self.batches = BatchRecord(self.device.native, self.loading.note_workers)
        self.evaluations = Evaluations(self.device.native, self.notes.add, self.device.is_library)
        self.loaders = UnreadLoaders(self.notes.add, self.device.is_library)
        self.steps.before_stop = self.loaders.report
        self.collectives = CollectiveRecord()
        self.ranks_per_node = settings.ranks_per_node or self.device.gpus
        self.device.price_collectives(self._collective_ns)
        self.exchange = Exchange(
            self.device.native, self.collectives, self.link, Buffers(self.device.gpu, self.ranks_per_node)
        )
        self.skipped = Skipped()
        self.trace: RankTrace | None = None
        self.failure = ""  # in words, if the program has failed
        self.forked = False
        self.others: OtherRanks | None = None
        self.files = FilesRead() if settings.note_files else None
        self.log: dict[str, dict[str, Any]] = {}  # lines of the framework's own log, by name: report/framework_log.py
        self._see_all(settings.ranks_per_node or 1)
        self._install()
        if self.rank is not None:
            self._join_world(self.rank, self.world_size)
        self.device.native.start_recording()

    def _install(self) -> None:
        """Puts everything that records or replaces something in place. What is installed later sees what was installed before."""
        native, patches = self.device.native, self.device.patches
        plain_module_call = torch.nn.Module.__call__
        self.modules.install(patches)
        self.workload = WorkloadRecord(self.modules.watch)  # before the steps, whose last one ends the program
        patches.on_undo(lambda: self.workload.close())
        self.device.where = self.modules.where
        self.steps.install(patches)
        self.batches.install(patches)
        self.loading.install(patches)
        self.loaders.install(patches)
        self.device.rules.unknown = self.unknown
        self.unknown.install(patches)
        close_values.install(patches, native)
        self._finish_torchscript = torchscript.install(patches, self.notes.add)
        collectives_shim.install(native, self.exchange, self.link or LocalKeys(), self._join_world, patches)
        self.checkpoints = checkpoints.install(native, patches, self.skipped)
        self.compile = TorchCompile(self.device, plain_module_call, lambda: self.steps.under_way)
        if self.link is not None:
            spawn.install(self.link, lambda: self.settings, patches)
            if self.owns_process:
                children.install(self.link, self._only_starts_others, patches)
        self._keep_as_found()
        install_all(self)

    def _only_starts_others(self) -> bool:
        """So far. A process of torch.multiprocessing may be about to become a rank that others wait for."""
        return self.rank is None and multiprocessing.parent_process() is None

    def _collective_ns(self, number: int) -> float:
        """The duration of a collective, for a program that times its GPU."""
        call = self.collectives.calls[number]
        group = self.collectives.communicators[call.communicator]
        machine = self.settings.request.cluster(self.ranks_per_node, -(-self.world_size // self.ranks_per_node))
        return collective_seconds(call, group, machine) * 1e9

    def _keep_as_found(self) -> None:
        """Restores, at the end, what frameworks set for a job and leave behind."""
        patches = self.device.patches
        patches.on_undo(functools.partial(torch.set_num_threads, torch.get_num_threads()))
        for name in (*World(1, 2).environment(0), "NODE_RANK", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG"):
            patches.keep(os.environ, name)

    def _see_all(self, needed: int) -> None:
        """Ignores CUDA_VISIBLE_DEVICES of the machine that Maya runs on, if it shows fewer GPUs than the job needs: it is not the cluster's."""
        value = os.environ.get(VISIBLE)
        if value is None or value != self.settings.machine_visible:
            return
        if (visible_gpus(value, self.settings.request.gpus_per_node) or 0) < needed:
            self.device.patches.keep(os.environ, VISIBLE)
            del os.environ[VISIBLE]
            self.notes.add(
                f"{VISIBLE}={value!r}, which was set when Maya was started, is ignored: the job needs {needed} GPU{'s' * (needed != 1)} of each node."
            )

    def _stepped(self, step: int) -> None:
        if step == 1:
            self._look_for_differences()
        if self._tell_step is not None:
            self._tell_step(step)

    def _look_for_differences(self) -> None:
        """Has other ranks emulated, too, if the program does different work by its rank. Rank 0 decides it, once."""
        alone = self.link is None or self.settings.chosen
        if alone or self.rank != 0 or self.world_size == 1 or self.differences is not None:
            return
        self.differences = rank_differences(self.world_size, self.ranks_per_node)
        for rank in self.differences.needed[1:]:
            self.exchange.meet(rank)

    def grow(self, gpus: int) -> None:
        """The program has now said how many GPUs the node has."""
        self._see_all(gpus)
        self.device.grow(gpus)
        self._place(self.device.gpus)

    def _place(self, ranks_per_node: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.exchange.buffers = Buffers(self.device.gpu, ranks_per_node)

    def become_world(self, world: World) -> None:
        """The program asks for that world, and nobody has started it: this process becomes rank 0, with the environment that torchrun
        would give it. Other ranks that turn out to be needed run the same program."""
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

    def continue_in_fork(self, settings: ProcessSettings) -> None:
        """This process is a fork of the emulated one: it is another rank, with its own record."""
        self.forked = True
        self.settings = settings
        if settings.note_files and self.files is None:
            self.files = FilesRead()
        self.rank = None
        self.steps.limit = settings.request.steps
        self.steps.restart()
        self.batches.restart()
        self.loading.restart()
        self.evaluations.restart()
        self.loaders.restart()
        self.unknown.restart(settings.request.assume, settings.unknown)
        self.workload.close()
        self.workload = WorkloadRecord(self.modules.watch)
        self.collectives.clear()
        self.device.native.forget_collective_calls()
        if self.link is not None:
            self.link.reconnect(settings.coordinator, frozenset(settings.chosen))
            self._tell_step = self.link.step
            self.steps.on_step = self._stepped
        if settings.rank is not None:  # it belongs to another job than the process that was forked
            self.world_size = settings.world_size
            self._place(settings.ranks_per_node or self.device.gpus)
            self._join_world(settings.rank, settings.world_size)
        self.device.native.start_recording()

    def finish(self, ended: str = "completed") -> RankTrace:
        """Takes the record, removes the device, and writes the trace if there is a folder for it."""
        if self.trace is not None:
            return self.trace
        native = self.device.native
        native.stop_recording()
        self._look_for_differences()
        self.steps.finish()
        if not self.steps.marked_line_was_reached:
            self.notes.add(f"--step-at {self.settings.request.step_at}: the program did not come to that line.")
        for place in self.unknown.unused():
            self.notes.add(f"--assume {place}: the program read no unknown value there.")
        self._finish_torchscript()
        hung = self.link.hung if self.link else ""
        if self.steps.enough and not self.evaluations.out_of_memory:
            ended = "stopped"
        elif hung:
            ended = "hung"
        record = self.evaluations.in_phase(np.frombuffer(native.take_events(), EVENT))
        self.trace = RankTrace(
            meta=self._meta(ended, hung, record),
            events=_with_marks(record, self.steps.ends, self.evaluations.marks(), cut=self.steps.enough),
            calls=self.device.planner.calls,
            modules=list(self.modules.names),
            streams=native.streams(),
            communicators=self.collectives.communicators,
            collectives=self.collectives.calls,
            sites=[_below_fork_server(site) for site in self.collectives.sites],
            lines=native.lines(),
        )
        if not self.forked:  # a fork is about to end, and has no threads to undo things with
            self.device.remove()
        self._write(self.trace)
        if self.others is not None and self.link is not None:
            self.link.idle(True)
            self.others.wait()
        return self.trace

    def _meta(self, ended: str, hung: str, record: np.ndarray) -> dict[str, Any]:
        """What the trace says about the process."""
        gpu = self.device.gpu
        stats = [self.device.native.memory_stats(device) for device in range(self.device.gpus)]
        forward, backward = (
            np.flatnonzero((record["kind"] == EventKind.OP) & (record["phase"] == phase))
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        return {
            "maya": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpu": gpu.name,
            "gpus": self.device.gpus,
            "node_gpus": self.settings.request.gpus_per_node,
            "ranks_per_node": self.ranks_per_node,
            "gpu_memory_bytes": gpu.memory_bytes,
            "outside_allocator_bytes": gpu.outside_bytes,
            "nccl_bytes": self.exchange.buffer_bytes,
            "rank": self.rank or 0,
            "process": "rank" if self.rank is not None else "child" if self.settings.inherited else "program",
            "world_size": self.world_size,
            "ended": ended,
            "steps": len(self.steps.ends),
            "alloc_retries": [each["num_alloc_retries"] for each in stats],
            "stand_ins": self.exchange.stand_ins,
            "assumed_ranks": sorted(self.exchange.assumed),
            "rank_differences": asdict(self.differences) if self.differences and self.differences.differ else None,
            "hung": hung,
            "failure": self.failure,
            "data": self.batches.by_step(self.steps.ends, forward, backward),
            "loading": self.loading.found(self.steps.ends),
            "evaluations": self.evaluations.found(),
            "idle_optimizers": self.steps.idle,
            "workload": self.workload.found(),
            "log": self.log,
            "files": self.files.found() if self.files is not None else [],
            "compiled": self.compile.record.found(),
            "unknown_values": self.unknown.found(),
            "asked_gpu": list(self.device.asked_gpu),
            "notes": self.notes.sentences,
        }

    def _write(self, trace: RankTrace) -> None:
        """Into the run's folder. A process that only started the ranks has nothing to write."""
        worked = np.isin((EventKind.OP, EventKind.OUT_OF_MEMORY), trace.events["kind"]).any()
        folder = self.settings.folder
        if folder is not None and (self.rank is not None or worked):
            folder.mkdir(parents=True, exist_ok=True)
            write_best(trace_path(folder, self.rank or 0), trace)


def _with_marks(events: np.ndarray, ends: list[int], evaluation: tuple[list[int], np.ndarray], cut: bool) -> np.ndarray:
    """The record with the ends of steps and of evaluation loops inserted, and without what came after the last of them if `cut`."""
    steps = np.zeros(len(ends), EVENT)
    steps["kind"] = EventKind.STEP_END
    steps["a"] = np.arange(1, len(ends) + 1)
    steps["phase"] = [events["phase"][end - 1] if end else 0 for end in ends]
    places, marks = [*ends, *evaluation[0]], np.concatenate([steps, evaluation[1]])
    for name in ("time_ns", "stream", "device"):
        marks[name] = [events[name][place - 1] if place else 0 for place in places]
    marked = np.insert(events, places, marks)
    return marked[: max(places) + len(places)] if cut and places else marked


def _below_fork_server(site: Site) -> Site:
    """A stack of a forked rank, outermost first, without the frames that call its program."""
    ours = [place for place, frame in enumerate(site) if frame.file == FORK_SERVER]
    return site[ours[-1] + 1 :] if ours else site
