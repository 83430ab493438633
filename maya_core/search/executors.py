"""Runs trials, either in worker processes of this machine or on a Ray cluster.

An executor returns the outcome of every task once, in any order. If a worker dies, its trial runs again in another one. What a
trial does is defined in `trial.py`.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NoReturn, Protocol

from maya_core.errors import MayaError
from maya_core.installation import how_to_install
from maya_core.launch.signals import TERMINATED
from maya_core.search.trial import Outcome, Task, close_worker, run_task
from maya_core.sockets import folder_for_sockets

TRIES = 3  # how often a task is started before its dying workers are an error


class Executor(Protocol):
    workers: int

    def outcomes(self, tasks: dict[int, Task]) -> Iterator[tuple[int, Outcome]]: ...

    def close(self) -> None: ...


def guarded(task: Task, folder: Path) -> Outcome:
    """Runs a task in a worker. A mistake in the program or its recipe becomes the outcome 'failed' of the trial."""
    if not folder.is_dir():
        raise MayaError(
            f"the folder {folder} of the trial does not exist on this machine.",
            "Share it with all machines, at the same path.",
        )
    os.chdir(folder)
    try:
        return run_task(task)
    except MayaError as error:
        return Outcome(status="failed", why=str(error))
    except SystemExit as ended:
        if ended.code == TERMINATED:  # the worker was terminated, the trial has not failed
            _end_worker()
        # The argument parser of torchrun exits.
        return Outcome(status="failed", why=f"the launcher refused the command (exit code {ended.code})")


def _end_worker(*_: object) -> NoReturn:
    """Ends the worker on SIGTERM, at once: an exception would not end the worker of a pool."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    close_worker()
    os._exit(TERMINATED)


class LocalExecutor:
    """Worker processes on this machine, each of which runs many trials."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._folder = Path.cwd()
        # The temporary folder of all workers. It is removed here, so that a worker that is killed leaves nothing behind.
        prefix = "maya-"
        self._temporary = tempfile.TemporaryDirectory(
            prefix=prefix, dir=folder_for_sockets(len(prefix) + 9), ignore_cleanup_errors=True
        )
        self._pool = self._make()

    def _make(self) -> ProcessPoolExecutor:
        arguments = (os.getpid(), self._temporary.name)
        return ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"), _begin_worker, arguments)

    def outcomes(self, tasks: dict[int, Task]) -> Iterator[tuple[int, Outcome]]:
        tries = dict.fromkeys(tasks, 0)
        running = self._submit(tasks)
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            broken: dict[int, Task] = {}
            for future in done:
                number = running.pop(future)
                try:
                    yield number, future.result()
                except BrokenProcessPool:
                    broken[number] = tasks[number]
            if broken:  # a broken pool also breaks all tasks that were running in it
                broken |= {number: tasks[number] for number in running.values()}
                for number in broken:
                    tries[number] += 1
                    if tries[number] >= TRIES:
                        raise MayaError(
                            f"the worker of trial {number} was killed {TRIES} times, most likely because this machine ran out of memory.",
                            "Give fewer --workers. All outcomes so far are stored: the same command resumes the search.",
                        )
                self._pool.shutdown(wait=False)
                self._pool = self._make()
                running = self._submit(broken)

    def _submit(self, tasks: dict[int, Task]) -> dict[Future[Outcome], int]:
        return {self._pool.submit(guarded, task, self._folder): number for number, task in tasks.items()}

    def close(self) -> None:
        for process in list((self._pool._processes or {}).values()):
            process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._temporary.cleanup()


def _begin_worker(parent: int, temporary: str) -> None:
    """Sets up a worker. It ends when its parent ends, in whatever way, and then stops its fork servers."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    tempfile.tempdir = temporary
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.util.Finalize(None, close_worker, exitpriority=10)  # if the worker ends normally
    signal.signal(signal.SIGTERM, _end_worker)
    silent = os.open(os.devnull, os.O_WRONLY)  # the terminal belongs to the search
    os.dup2(silent, 1)
    os.dup2(silent, 2)


class RayExecutor:
    """An existing Ray cluster. Its machines need Maya, and the folders of the search at the same paths."""

    def __init__(self, address: str | None, workers: int | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MayaError("Ray is not installed.", f"Run: {how_to_install('ray')}") from error
        self._ray: Any = ray
        self._folder = Path.cwd()
        try:
            if not ray.is_initialized():
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR, namespace="maya")
        except ConnectionError as error:
            raise MayaError(
                f"no Ray cluster answers at {address or 'auto'}: {str(error).splitlines()[0]}",
                "Start one with `ray start --head`, or give the address of yours with --ray-address.",
            ) from error
        self.workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        # If a worker or a machine dies, Ray itself runs the task again.
        self._run = ray.remote(num_cpus=1, max_retries=TRIES)(guarded)

    def outcomes(self, tasks: dict[int, Task]) -> Iterator[tuple[int, Outcome]]:
        waiting = list(tasks)
        running: dict[Any, int] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                number = waiting.pop(0)
                running[self._run.remote(tasks[number], self._folder)] = number
            done, _ = self._ray.wait(list(running), num_returns=1)
            for reference in done:
                number = running.pop(reference)
                try:
                    outcome = self._ray.get(reference)
                except self._ray.exceptions.RayTaskError as error:
                    cause = error.cause if isinstance(error.cause, MayaError) else None
                    raise (cause or MayaError(f"trial {number} failed on Ray: {error}")) from error
                except self._ray.exceptions.RayError as error:
                    raise MayaError(
                        f"Ray lost trial {number} {TRIES + 1} times: {str(error).splitlines()[0]}",
                        "All outcomes so far are stored: the same command resumes the search.",
                    ) from error
                yield number, outcome

    def close(self) -> None:
        self._ray.shutdown()
