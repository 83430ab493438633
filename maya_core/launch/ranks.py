"""The processes of a job's ranks: started as they are needed, watched, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from maya_core.errors import MayaError
from maya_core.launch.fork_server import ForkedRank, ForkServer
from maya_core.launch.link import Link
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.launch.world import World

POLL_S = 0.02
GRACE_S = 5.0

RankProcess = subprocess.Popen[bytes] | ForkedRank
Start = Callable[[int], RankProcess]


@dataclass(frozen=True)
class RankSetting:
    """What a job that is one of many is run in: its own part of the environment, files for its output, a process to fork ranks from."""

    environment: dict[str, str] = field(default_factory=dict)
    output: tuple[IO[bytes], IO[bytes]] | None = None
    fork_server: ForkServer | None = None


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
    """A process of the world, with what a launcher tells it in its environment. Its output is read here if it is to be kept `apart`, or goes
    into `files`. With a `fork_server` it is forked from that, where it can be."""
    told = settings.model_copy(
        update={
            "rank": rank,
            "world_size": world.size,
            "ranks_per_node": world.ranks_per_node,
            "gpus": max(settings.gpus or 1, world.ranks_per_node),
        }
    )
    environment = {**environment, VARIABLE: told.model_dump_json()}
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


def run_ranks(link: Link, world_size: int, start: Start, done: Callable[[], bool] = lambda: True) -> int:
    """Runs the ranks that must be, and those that they turn out to need, until `done` says that nobody can need more. The
    exit code of the first that failed, or 0."""
    link.world(world_size)
    running: dict[int, RankProcess] = {}
    forwarders: list[threading.Thread] = []
    exit_code = 0
    try:
        while True:
            rank, more = link.next_rank(cores())
            if rank is not None:
                running[rank] = start(rank)
                forwarders += _forward(rank, running[rank])
                continue
            for rank, code in [(rank, code) for rank, one in running.items() if (code := one.poll()) is not None]:
                _end_children_of(running.pop(rank))
                link.ended(rank)
                if code < 0:
                    full = "If the machine ran out of memory, emulate fewer ranks (--ranks) or give it more."
                    raise MayaError(
                        f"rank {rank} was killed by {_signal_name(-code)}: the run was ended, and there is no result.",
                        full if -code == signal.SIGKILL else "Its own output above may say more.",
                    )
                if code and not exit_code:
                    exit_code = code
                    link.drop_queued()
            if not running and not more and done() and not link.next_rank(0)[1]:
                return exit_code
            time.sleep(POLL_S)
    finally:
        end_all(running)
        for forwarder in forwarders:
            forwarder.join(timeout=GRACE_S)


def end_all(running: dict[int, RankProcess]) -> None:
    """Asks the processes left to end, and those that do not, no longer."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for process in running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sent)
        deadline = time.monotonic() + GRACE_S
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))


def _end_children_of(process: RankProcess) -> None:
    """What a rank has left behind: data loaders' workers, if it was killed."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _forward(rank: int, process: RankProcess) -> list[threading.Thread]:
    """Passes a rank's output on, marked with its rank; rank 0 speaks for itself."""
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
