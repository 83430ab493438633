"""Further ranks of a program that started as one process and turned out to be a job. Each runs the same command again, as frameworks do that
start their own processes."""

from __future__ import annotations

import sys
import threading

from maya_core.launch.link import Link
from maya_core.launch.ranks import RankProcess, run_ranks, start_rank
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World


def program_again() -> list[str] | None:
    """The command that runs this program again; None for a notebook or a prompt, which have none."""
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is None or "ipykernel" in sys.modules:
        return None
    return [sys.executable, *sys.orig_argv[1:]]


class OtherRanks:
    """The ranks other than this process. They are started in the background, when they are needed."""

    def __init__(self, link: Link, settings: ProcessSettings, world: World, command: list[str]) -> None:
        self._link = link
        self._settings = settings
        self._world = world
        self._command = command
        self._last = threading.Event()  # rank 0 has ended, and needs no further ranks
        self._failure: BaseException | None = None
        self.exit_code = 0
        self._thread = threading.Thread(target=self._run, name="maya-ranks", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until all have ended. Raises the error that prevented it."""
        self._last.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self.exit_code = run_ranks(self._link, self._world.size, self._start, self._last.is_set)
        except BaseException as error:  # `wait` raises it in the thread that can handle it
            self._failure = error

    def _start(self, rank: int) -> RankProcess:
        return start_rank(self._command, self._settings, self._world, rank, self._world.environment(rank), apart=True)
