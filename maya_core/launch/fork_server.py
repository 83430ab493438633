"""A process that ranks are forked from, so that starting a rank no longer consists mostly of imports. To its program, a fork looks like any
other process.

    with ForkServer() as server:                            # has imported torch: for the ranks of one job
        server.start([sys.executable, "-u", "train.py"], environment)
    ForkServer(["my_model"], request=request, gpus=8)       # has imported the program's modules, with the emulation on: for many jobs

In the first kind nothing is emulated yet: the program imports torch, which costs nothing any more, and that switches the emulation on. In the
second kind the emulation is on from the start, so torch reads its environment variables only once. A program that sets such a variable
itself (READ_ONCE) ends with NOT_HERE, and needs its own process. The process itself is `maya_core.session.forked`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from maya_core.errors import MayaError
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.request import Request
from maya_core.torch_seam.compile import DYNAMO

SERVER = "maya_core.session.forked"  # what runs in the process; named, because it belongs to a room further right
# Parts of torch that training programs of many ranks import sooner or later; optimizers alone import dynamo.
AHEAD = (
    DYNAMO,
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "maya_core.session.emulation",
)
# Variables that torch, or the emulated device in its place, reads when it is imported.
READ_ONCE = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "CUDA_VISIBLE_DEVICES",
)
NOT_HERE = 75  # exit code of a program that needs its own process (EX_TEMPFAIL)
POLL_S = 0.01
LARGEST_REQUEST = 1 << 17  # of a command and its environment


class ForkedRank:
    """The part of subprocess.Popen that watching a rank needs."""

    def __init__(self, fork_server: ForkServer, pid: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._fork_server = fork_server

    def poll(self) -> int | None:
        return self._fork_server.exit_code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ForkServer:
    """Its process starts with the first rank. Use it as a context manager, or `close` it."""

    def __init__(
        self,
        modules: Sequence[str] = AHEAD,
        *,
        request: Request | None = None,
        gpus: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._modules, self._request, self._gpus = modules, request, gpus
        self._environment = environment or {}  # common to all its ranks
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}  # of forks that have ended
        self._until_end = contextlib.ExitStack()
        self._line: socket.socket | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._line = None
        self._until_end.close()

    def start(
        self, command: list[str], environment: dict[str, str], output: tuple[int, int] | None = None
    ) -> ForkedRank | None:
        """A fork that runs the command, with this environment on top of ours; None if the command is not a Python program that a fork could
        run. Its output goes into two files, or whoever starts it reads it."""
        request = json.dumps([command, {**os.environ, **environment}, os.getcwd()]).encode()
        if program_in(command) is None or len(request) > LARGEST_REQUEST:
            return None
        ours: list[IO[bytes] | None] = [None, None]
        theirs: Sequence[int] = output or ()
        if not output:
            (out, out_there), (err, err_there) = os.pipe(), os.pipe()
            ours, theirs = [os.fdopen(out, "rb"), os.fdopen(err, "rb")], (out_there, err_there)
        with self._lock:
            socket.send_fds(self._line or self._open(), [request], list(theirs))
            if not output:
                for file in theirs:
                    os.close(file)
            while True:
                said, pid, code = self._hear()
                if said == "started":
                    return ForkedRank(self, pid, *ours)
                self._codes[pid] = code

    def exit_code(self, pid: int) -> int | None:
        with self._lock:
            line = self._line
            while pid not in self._codes and line is not None and select.select([line], [], [], 0)[0]:
                _, ended, code = self._hear()
                self._codes[ended] = code
            return self._codes.get(pid)

    def _open(self) -> socket.socket:
        environment = {**os.environ, **self._environment}
        environment.pop(VARIABLE, None)
        if self._request is not None:  # connected to a coordinator, as every emulated process is: so it ends with us
            coordinator = self._until_end.enter_context(Coordinator())
            request = self._request.model_copy(update={"steps": None})
            settings = ProcessSettings(request=request, gpus=self._gpus, rank=None, coordinator=coordinator.socket)
            environment |= {VARIABLE: settings.model_dump_json()}
            environment.setdefault("OMP_NUM_THREADS", "1")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # torch first: importing it begins the emulation, if it is to be on.
        begin = (
            f"import os; started = dict(os.environ); import torch; import {SERVER} as server; "
            f"server.main({there.fileno()}, {list(self._modules)}, started)"
        )
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", begin],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        self._until_end.callback(process.wait)
        self._until_end.callback(here.close)
        self._line = here
        return here

    def _hear(self) -> tuple[str, int, int]:
        assert self._line is not None
        said = self._line.recv(LARGEST_REQUEST)
        if not said:
            raise MayaError(
                "the process that ranks are forked from was killed. The run has ended, and there is no result.",
                "If the machine ran out of memory, emulate fewer ranks (--ranks) or use a machine with more.",
            )
        what, pid, code = json.loads(said)
        return what, pid, code


def program_in(command: list[str]) -> tuple[str | None, str | None, list[str]] | None:
    """(script, module, arguments) of `python [-u] script.py ...` or `python [-u] -m module ...`; None for any other command."""
    if command[0] != sys.executable:
        return None
    words = command[1:]
    while words and words[0] == "-u":
        words = words[1:]
    if len(words) >= 2 and words[0] == "-m":
        return None, words[1], words[2:]
    if words and not words[0].startswith("-") and Path(words[0]).is_file():
        return words[0], None, words[1:]
    return None


def imports_of(script: Path) -> list[str]:
    """Modules that a script imports by name, anywhere in it: its ranks would spend their first seconds on them. The user's own modules are
    not among them, for they may do anything when they are imported."""
    try:
        tree = ast.parse(script.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
    own = {path.stem for path in script.parent.iterdir()}
    return [name for name in found if name.split(".")[0] not in own]
