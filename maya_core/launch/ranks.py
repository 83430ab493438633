"""The processes of a job's ranks: started as they are needed, watched, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

from maya_core.errors import MayaError
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.fork_server import ForkedRank, ForkServer
from maya_core.launch.link import Link
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.launch.world import World

POLL_S = 0.02
GRACE_S = 5.0

RankProcess = subprocess.Popen[bytes] | ForkedRank


class Watched(Protocol):
    """A started rank, as the loop that watches it needs it."""

    def poll(self) -> int | None:
        """The exit code, once it has ended."""


@dataclass(frozen=True)
class RankSetting:
    """The surroundings of a job that is one of many: its own part of the environment, files for its output, and a process to fork its ranks
    from."""

    environment: dict[str, str] = field(default_factory=dict)
    output: tuple[IO[bytes], IO[bytes]] | None = None
    fork_server: ForkServer | None = None

    def with_environment(self, more: dict[str, str]) -> RankSetting:
        return replace(self, environment={**self.environment, **more})


def cores() -> int:
    return len(os.sched_getaffinity(0))


def start_rank(
    command: list[str],
    settings: ProcessSettings,
    world: World,
    rank: int,
    environment: dict[str, str],
    apart: bool,
    files: tuple[IO[bytes], IO[bytes]] | None = None,
    fork_server: ForkServer | None = None,
) -> RankProcess:
    """Starts a rank, with the environment that a launcher would give it. Its output is read here if it is kept `apart`, or goes into
    `files`. It is forked from the `fork_server` if there is one and the command allows it."""
    own = settings.model_copy(
        update={
            "rank": rank,
            "inherited": False,
            "world_size": world.size,
            "ranks_per_node": world.ranks_per_node,
            "gpus": max(settings.gpus or 1, world.ranks_per_node),
        }
    )
    environment = {**environment, VARIABLE: own.model_dump_json()}
    if fork_server is not None and (apart or files is not None):
        forked = fork_server.start(command, environment, (files[0].fileno(), files[1].fileno()) if files else None)
        if forked is not None:
            return forked
    output = subprocess.PIPE if apart else None
    out, err = files or (output, output)
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


@dataclass
class RankLoop:
    """Starts the ranks that must be emulated, and those that they turn out to need, and watches them. `start` starts a rank; `on_end` is called
    with a rank, its process and its exit code; `finished` says when nobody can need further ranks."""

    link: Link
    start: Callable[[int], Watched]
    on_end: Callable[[int, Watched, int], None]
    finished: Callable[[], bool] = lambda: True
    running: dict[int, Watched] = field(default_factory=dict)

    def run(self, timeout: float | None = None) -> bool:
        """Until all ranks have ended. False if the time was over before."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is None or time.monotonic() < deadline:
            rank, more = self.link.next_rank(cores())
            if rank is not None:
                self.running[rank] = self.start(rank)
                continue
            for rank, process in list(self.running.items()):
                if (code := process.poll()) is not None:
                    del self.running[rank]
                    self.link.ended(rank, code)
                    self.on_end(rank, process, code)
            if not self.running and not more and self.finished() and not self.link.next_rank(0)[1]:
                return True
            time.sleep(POLL_S)
        return False


def run_ranks(
    link: Link, world_size: int, start: Callable[[int], RankProcess], finished: Callable[[], bool] = lambda: True
) -> int:
    """Runs a job's ranks as processes of their own. The exit code of the first that failed, or 0."""
    link.world(world_size)
    forwarders: list[threading.Thread] = []
    processes: dict[int, RankProcess] = {}
    failed: list[int] = []  # exit codes

    def start_and_forward(rank: int) -> RankProcess:
        processes[rank] = start(rank)
        forwarders.extend(_forward(rank, processes[rank]))
        return processes[rank]

    def on_end(rank: int, _: Watched, code: int) -> None:
        _end_children_of(processes.pop(rank))
        if code < 0:
            full = "If the machine ran out of memory, emulate fewer ranks (--ranks) or use a machine with more."
            raise MayaError(
                f"rank {rank} was killed by {_signal_name(-code)}. The run has ended, and there is no result.",
                full if -code == signal.SIGKILL else "Its own output above may say more.",
            )
        if code and not failed:
            failed.append(code)
            link.start_no_more()

    try:
        RankLoop(link, start_and_forward, on_end, finished).run()
        return failed[0] if failed else 0
    finally:
        end_all(processes)
        for forwarder in forwarders:
            forwarder.join(timeout=GRACE_S)


class RankLauncher:
    """Runs the ranks of a launcher's job: what it would start on many machines is started here, as far as it is needed."""

    def __init__(self, link: Link, settings: ProcessSettings) -> None:
        self.link = link
        self.settings = settings

    def run(
        self,
        world: World,
        program: Callable[[int], list[str]],
        environment: Callable[[int], dict[str, str]],
        setting: RankSetting | None = None,
        forks: bool = True,
        on_start: Callable[[RankProcess], None] = lambda _: None,
    ) -> int:
        """Runs ranks of the world by the command and the environment that each has. The exit code of the first that failed, or 0. With
        `forks`, ranks after the first are forked from a process that has imported torch."""
        setting = setting or RankSetting()
        program(0)  # so that a wrong program is reported now

        def start(rank: int) -> RankProcess:
            # A progress bar shares the terminal with rank 0's output, so both must come from this process.
            apart = setting.output is None and (rank != 0 or sys.stderr.isatty())
            variables = {**setting.environment, **environment(rank)}
            # Rank 0 runs while the process starts that the others are forked from.
            server = setting.fork_server or (fork_server if rank and forks else None)
            process = start_rank(program(rank), self.settings, world, rank, variables, apart, setting.output, server)
            on_start(process)
            return process

        self.link.idle(True)
        with ForkServer() as fork_server:
            return run_ranks(self.link, world.size, start)

    def only_child(self) -> dict[str, str]:
        """Variables for a single process that does all the work, on one GPU: it is emulated as this one is, which only waits from now on."""
        self.link.idle(True)
        settings = self.settings.model_copy(update={"rank": None, "inherited": False, "gpus": 1})
        return {VARIABLE: settings.model_dump_json()}

    @contextmanager
    def separate_job(self, folder: Path) -> Iterator[RankLauncher]:
        """A launcher for a job of its own, whose traces go to that folder."""
        with Coordinator() as coordinator:
            settings = self.settings.model_copy(update={"folder": folder, "coordinator": coordinator.socket})
            link = Link(coordinator.socket, frozenset())
            try:
                yield RankLauncher(link, settings)
            finally:
                link.close()


def end_all(running: dict[int, RankProcess]) -> None:
    """Asks the remaining processes to end, and kills those that do not."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for process in running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sent)
        deadline = time.monotonic() + GRACE_S
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))


def _end_children_of(process: RankProcess) -> None:
    """Ends what a killed rank has left behind, such as data loaders' workers."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _forward(rank: int, process: RankProcess) -> list[threading.Thread]:
    """Passes on a rank's output, each line marked with the rank; rank 0's as it is."""
    threads = []
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if source is not None:
            threads.append(threading.Thread(target=_copy_lines, args=(rank, source, target), daemon=True))
            threads[-1].start()
    return threads


def _copy_lines(rank: int, source: IO[bytes], target: IO[str]) -> None:
    if rank == 0:
        while chunk := os.read(source.fileno(), 1 << 16):
            target.write(chunk.decode(errors="replace"))
            target.flush()
    for line in source:
        target.write(f"[rank {rank}] " + line.decode(errors="replace"))
        target.flush()
