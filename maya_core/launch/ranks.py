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
from typing import IO

from maya_core.errors import MayaError
from maya_core.launch.link import Link

POLL_S = 0.02
GRACE_S = 5.0

Start = Callable[[int], "subprocess.Popen[bytes]"]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_ranks(link: Link, world_size: int, start: Start) -> int:
    """Runs the ranks that must be, and those that they turn out to need. The exit code of the first that failed, or 0."""
    link.idle(True)
    link.world(world_size)
    running: dict[int, subprocess.Popen[bytes]] = {}
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
            if not running and not more:
                return exit_code
            time.sleep(POLL_S)
    finally:
        end_all(running)
        for forwarder in forwarders:
            forwarder.join(timeout=GRACE_S)


def end_all(running: dict[int, subprocess.Popen[bytes]]) -> None:
    """Asks the processes left to end, and those that do not, no longer."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for process in running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sent)
        deadline = time.monotonic() + GRACE_S
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))


def _end_children_of(process: subprocess.Popen[bytes]) -> None:
    """What a rank has left behind: data loaders' workers, if it was killed."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _forward(rank: int, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
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
