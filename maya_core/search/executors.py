"""Where trials run: in worker processes of this machine, or on a Ray cluster. Either gives each task's outcome once, in whatever order they
come; a worker that dies takes no trial with it."""

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
from maya_core.launch.signals import TERMINATED
from maya_core.search.trial import Outcome, Task, close_worker, run_task
from maya_core.sockets import folder_for_sockets

TRIES = 3  # of a task whose worker died under it


class Executor(Protocol):
    workers: int

    def outcomes(self, tasks: dict[int, Task]) -> Iterator[tuple[int, Outcome]]: ...

    def close(self) -> None: ...


def guarded(task: Task, folder: Path) -> Outcome:
    """In the worker. What a program or its recipe does wrong is that trial's outcome."""
    if not folder.is_dir():
        raise MayaError(
            f"there is no folder {folder} where the trial is to run.", "Share it with all machines, at the same path."
        )
    os.chdir(folder)
    try:
        return run_task(task)
    except MayaError as error:
        return Outcome(status="failed", why=str(error))
    except SystemExit as ended:
        if ended.code == TERMINATED:  # no trial has failed
            _end_worker()
        # torchrun's own parser
        return Outcome(status="failed", why=f"the command was refused by its launcher (exit code {ended.code})")


def _end_worker(*_: object) -> NoReturn:
    """When it is told to. At once: an exception would not end a pool's worker."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asked twice, it would not get to cleaning up
    close_worker()
    os._exit(TERMINATED)


class LocalExecutor:
    """Processes that live on from trial to trial."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._folder = Path.cwd()
        # Of all workers, and removed here: wherever one is when it is told to end, or killed, it leaves nothing behind.
        prefix = "maya-"
        self._temporary = tempfile.TemporaryDirectory(
            prefix=prefix, dir=folder_for_sockets(len(prefix) + 9), ignore_cleanup_errors=True
        )
        self._pool = self._make()

    def _make(self) -> ProcessPoolExecutor:
        told = (os.getpid(), self._temporary.name)
        return ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"), _begin_worker, told)

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
            if broken:  # all that were running with it are broken, too
                broken |= {number: tasks[number] for number in running.values()}
                for number in broken:
                    tries[number] += 1
                    if tries[number] >= TRIES:
                        raise MayaError(
                            f"the worker of trial {number} was killed {TRIES} times, most likely for this machine's memory.",
                            "Give fewer --workers. What was found is kept: the same command goes on from there.",
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
    """Ends with its parent, however that ends; what a worker keeps ends with the worker."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    tempfile.tempdir = temporary
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.util.Finalize(None, close_worker, exitpriority=10)  # when it ends by itself
    signal.signal(signal.SIGTERM, _end_worker)
    silent = os.open(os.devnull, os.O_WRONLY)  # the terminal is the search's
    os.dup2(silent, 1)
    os.dup2(silent, 2)


class RayExecutor:
    """An existing Ray cluster; its machines need Maya installed, and the folders of the search at the same paths."""

    def __init__(self, address: str | None, workers: int | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MayaError("Ray is not installed.", "pip install 'maya-emulator[ray]'") from error
        self._ray: Any = ray
        self._folder = Path.cwd()
        try:
            if not ray.is_initialized():
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR, namespace="maya")
        except ConnectionError as error:
            raise MayaError(
                f"no Ray cluster answers at {address or 'auto'}: {str(error).splitlines()[0]}",
                "Start one with `ray start --head`, or give its --ray-address.",
            ) from error
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        # Ray itself runs a task again whose worker or machine died.
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
                        f"trial {number} was lost by Ray {TRIES + 1} times: {str(error).splitlines()[0]}",
                        "What was found is kept: the same command goes on from there.",
                    ) from error
                yield number, outcome

    def close(self) -> None:
        self._ray.shutdown()
