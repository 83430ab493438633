"""Ranks that a program starts itself, with torch.multiprocessing: mp.spawn starts only those the emulation needs, and
processes started by hand are emulated like their parent. torch.distributed.run is taken over in the same way, so that
a launcher inside a script is found too. Checked with torch 2.13."""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as torch_mp

from maya_core.device.patches import Patches
from maya_core.launch.link import Link
from maya_core.launch.ranks import POLL_S, cores
from maya_core.launch.settings import VARIABLE, ProcessSettings


def install(link: Link, settings: Callable[[], ProcessSettings], patches: Patches) -> None:
    """`settings` are asked for when ranks are started: a forked process has its own."""
    process = multiprocessing.process.BaseProcess
    patches.set(process, "start", _emulating_children(process.start, settings))
    patches.set(process, "join", _idle_while(process.join, link))
    spawn = sys.modules["torch.multiprocessing.spawn"]
    start_processes = functools.partial(_start_needed, torch_mp.start_processes, link)
    for module in (torch_mp, spawn):
        patches.set(module, "start_processes", start_processes)
    import torch.distributed.run

    patches.set(torch.distributed.run, "run", functools.partial(_run_torchrun, link, settings))


def _emulating_children(original: Callable[..., None], settings: Callable[[], ProcessSettings]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: Any) -> None:
        if self.daemon:  # a data loader's worker, or a helper
            return original(self)
        child = settings().model_copy(update={"rank": None})
        self._target = EmulatedTarget(self._target, child)
        os.environ[VARIABLE] = child.model_dump_json()
        try:
            original(self)
        finally:
            os.environ.pop(VARIABLE, None)

    return start


class EmulatedTarget:
    """A child's function. Writes the child's trace when it ends: not every child runs exit handlers."""

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
        if self.daemon:  # a data loader's worker: no rank, and what it is waited for comes by itself
            return original(self, timeout)
        link.idle(True)
        try:
            original(self, timeout)
        finally:
            link.idle(False)

    return join


class _FromIndex:
    """mp.spawn's function, for a process that is not the first."""

    def __init__(self, function: Callable[..., Any], index: int) -> None:
        self.function = function
        self.index = index

    def __call__(self, _: int, *args: Any) -> Any:
        return self.function(self.index, *args)


class NeededProcesses:
    """In place of mp.spawn's context: `join` starts what is needed and waits for it."""

    def __init__(self, link: Link, start: Callable[[int], Any]) -> None:
        self.link = link
        self.start = start
        self.running: dict[int, Any] = {}
        self.processes: list[Any] = []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        self.link.idle(True)
        while deadline is None or time.monotonic() < deadline:
            rank, more = self.link.next_rank(cores())
            if rank is not None:
                self.running[rank] = self.start(rank)
                self.processes += self.running[rank].processes
                continue
            try:
                done = [rank for rank, context in self.running.items() if context.join(timeout=0)]
            except BaseException:
                for context in self.running.values():
                    for process in context.processes:
                        process.terminate()
                raise
            for rank in done:
                del self.running[rank]
                self.link.ended(rank)
            if not self.running and not more:
                self.link.idle(False)
                return True
            time.sleep(POLL_S)
        return False

    def pids(self) -> list[int]:
        return [int(process.pid) for process in self.processes]


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
    """mp.start_processes, for the ranks that are needed: the process index is taken to be the rank."""
    link.world(nprocs)

    def start(rank: int) -> Any:
        return original(_FromIndex(fn, rank), args, 1, False, daemon, start_method)

    context = NeededProcesses(link, start)
    if not join:
        return context
    context.join()
    return None


def _run_torchrun(link: Link, settings: Callable[[], ProcessSettings], args: Any) -> None:
    from maya_core.launch import torchrun

    if code := torchrun.launch(args, link, settings()):
        raise SystemExit(code)
