"""Ranks that a program starts itself, with torch.multiprocessing: mp.spawn starts only the ranks that the emulation needs, and processes that
are started by hand are emulated like their parent. torch.distributed.run is replaced in the same way, so that a launcher inside a script
works too."""

from __future__ import annotations

import functools
import multiprocessing.process
import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as torch_mp

from maya_core.launch.link import Link
from maya_core.launch.ranks import RankLauncher, RankLoop
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.messages import say
from maya_core.patches import Patches
from maya_core.session.children import not_passed_on
from maya_core.torch_seam.distributed import RECORD, START_PROCESSES, TORCHRUN, TORCHRUN_FILE


def install(link: Link, settings: Callable[[], ProcessSettings], patches: Patches) -> None:
    """`settings` is called when ranks are started, because a forked process has its own."""
    process = multiprocessing.process.BaseProcess
    patches.set(process, "start", _emulating_children(process.start, settings))
    patches.set(process, "join", _idle_while(process.join, link))
    start_processes = functools.partial(_start_needed, torch_mp.start_processes, link)
    for each in START_PROCESSES:
        each.replace(patches, start_processes)
    run = functools.partial(_run_torchrun, link, settings)
    TORCHRUN.replace(patches, run)
    RECORD.wrap(patches, functools.partial(_replacing_run, run))


def _emulating_children(original: Callable[..., None], settings: Callable[[], ProcessSettings]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: Any) -> None:
        if self.daemon and _loads_data(self._target):
            with not_passed_on():
                return original(self)
        if self.daemon:  # a helper, which sees the GPU
            return original(self)
        child = settings().model_copy(update={"rank": None, "inherited": False})
        self._target = EmulatedTarget(self._target, child)
        with not_passed_on():
            os.environ[VARIABLE] = child.model_dump_json()
            original(self)
        return None

    return start


def _loads_data(target: Any) -> bool:
    """Whether a process is a worker of torch's data loader, which uses no GPU."""
    return str(getattr(target, "__module__", "")).startswith("torch.utils.data.")


class EmulatedTarget:
    """A child's function, which writes the child's trace when it ends: not every child runs exit handlers."""

    def __init__(self, target: Callable[..., Any] | None, settings: ProcessSettings) -> None:
        self.target = target
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from maya_core.session import process

        emulated = process.in_this_process(self.settings)
        try:
            return self.target(*args, **kwargs) if self.target else None
        except Exception:
            emulated.failed = True
            raise
        except SystemExit as error:  # mp.spawn ends a child so, whose function raised
            emulated.failed = bool(error.code)
            raise
        finally:
            emulated.finish()


def _idle_while(original: Callable[..., None], link: Link) -> Callable[..., None]:
    @functools.wraps(original)
    def join(self: Any, timeout: float | None = None) -> None:
        if self.daemon:  # a data loader's worker is no rank
            return original(self, timeout)
        with link.waiting():
            original(self, timeout)

    return join


class _FromIndex:
    """mp.spawn's function, for a process that is not the first."""

    def __init__(self, function: Callable[..., Any], index: int) -> None:
        self.function = function
        self.index = index

    def __call__(self, _: int, *args: Any) -> Any:
        return self.function(self.index, *args)


class SpawnedRank:
    """A rank that mp.spawn started."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def poll(self) -> int | None:
        """0 once it has ended; raises what its function raised."""
        return 0 if self.context.join(timeout=0) else None


class NeededProcesses:
    """Takes the place of mp.spawn's context: `join` starts the ranks that are needed and waits for them."""

    def __init__(self, link: Link, start: Callable[[int], Any]) -> None:
        self.link = link
        self.processes: list[Any] = []
        self._start_rank = start
        self._loop = RankLoop(link, self._start, lambda *_: None)

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        self.link.idle(True)
        try:
            finished = self._loop.run(timeout)
        except BaseException:
            for process in self.processes:
                if process.is_alive():
                    process.terminate()
            raise
        if finished:
            self.link.idle(False)
        return finished

    def pids(self) -> list[int]:
        return [int(process.pid) for process in self.processes]

    def _start(self, rank: int) -> SpawnedRank:
        context = self._start_rank(rank)
        self.processes += context.processes
        return SpawnedRank(context)


def _start_needed(
    original: Callable[..., Any],
    link: Link,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> NeededProcesses | None:
    """mp.start_processes, for the ranks that are needed. The index of a process is assumed to be its rank."""
    link.world(nprocs)

    def start(rank: int) -> Any:
        return original(_FromIndex(fn, rank), args, 1, False, daemon, start_method)

    context = NeededProcesses(link, start)
    if not join:
        return context
    context.join()
    return None


def _replacing_run(run: Callable[[Any], None], record: Callable[..., Any]) -> Callable[..., Any]:
    """`python -m torch.distributed.run` runs that module under another name. Its `main` is decorated by this function when `run` exists there."""

    @functools.wraps(record)
    def decorate(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = getattr(function, "__globals__", {})
        file = getattr(module.get("__spec__"), "origin", None) or module.get("__file__")
        if module.get("__name__") == "__main__" and file == TORCHRUN_FILE and TORCHRUN.name in module:
            module[TORCHRUN.name] = run
        return record(function, *args, **kwargs)

    return decorate


def _run_torchrun(link: Link, settings: Callable[[], ProcessSettings], args: Any) -> None:
    from maya_core.launch import torchrun

    if not link.first_job():
        say(f"a run has one job, so the ranks of this one are not started: {args.training_script}")
        return
    if code := torchrun.launch(args, RankLauncher(link, settings())):
        raise SystemExit(code)
