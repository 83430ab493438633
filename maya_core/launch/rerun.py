"""Ranks of a program that started as one process and turns out to be a job: each runs the same command again, as the frameworks
that start their own processes do."""

from __future__ import annotations

import sys
import threading

from maya_core.launch.link import Link
from maya_core.launch.ranks import RankProcess, run_ranks, start_rank
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World


def program_again() -> list[str] | None:
    """The command that runs this program once more; None for a notebook or a prompt, which cannot be."""
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is None or "ipykernel" in sys.modules:
        return None
    return [sys.executable, *sys.orig_argv[1:]]


class OtherRanks:
    """Ranks other than this process, started when they are needed, in the background."""

    def __init__(self, link: Link, settings: ProcessSettings, world: World, command: list[str]) -> None:
        self._link = link
        self._settings = settings
        self._world = world
        self._command = command
        self._last = threading.Event()  # rank 0 is done, and needs nobody new
        self._failure: BaseException | None = None
        self.exit_code = 0
        self._thread = threading.Thread(target=self._run, name="maya-ranks", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all are done. Raises what kept them from being."""
        self._last.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self.exit_code = run_ranks(self._link, self._world.size, self._start, self._last.is_set)
        except BaseException as error:  # told by `wait`, in the thread that can do something about it
            self._failure = error

    def _start(self, rank: int) -> RankProcess:
        return start_rank(self._command, self._settings, self._world, rank, self._world.environment(rank), apart=True)
