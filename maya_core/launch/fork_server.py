"""A process that ranks are forked from: starting a rank is then no longer mostly importing. To its program a fork is like any other process.

    with ForkServer() as fork_server:                                # torch is imported: for the ranks of one job
        fork_server.start([sys.executable, "-u", "train.py"], environment)
    ForkServer(["megatron.core"], gpu="h100", gpus=8)           # all of the program's modules, with the emulation on: for many jobs of it

In the first kind nothing is emulated yet: the program imports torch, which costs nothing any more, and that switches the emulation on. In the second it
is on from the start, so what torch reads of the environment is read once. A program that sets such a variable itself (READ_ONCE) ends with
NOT_HERE, and wants a process of its own.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import IO, Any, NoReturn

from maya_core.errors import MayaError
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.session.autoload import activate
from maya_core.trace.communication import Site

# What training programs of many ranks import of torch sooner or later; optimizers alone import torch._dynamo.
AHEAD = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "maya_core.session.emulation",
)
# What torch, or the emulated device in its place, reads when it is imported.
READ_ONCE = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "CUDA_VISIBLE_DEVICES",
)
NOT_HERE = 75  # exit code of a program that wants a process of its own (EX_TEMPFAIL)
POLL_S = 0.01
LARGEST_REQUEST = 1 << 17  # of a command and its environment


class ForkedRank:
    """As much of subprocess.Popen as those who watch a rank's process need."""

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
    """Started by the first rank that is asked of it. Use as a context manager, or `close` it."""

    def __init__(
        self,
        modules: Sequence[str] = AHEAD,
        *,
        gpu: str | None = None,
        gpus: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._modules, self._gpu, self._gpus = modules, gpu, gpus
        self._environment = environment or {}  # that all its ranks have in common
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
        """A fork that runs the command, with this environment on top of ours; None if the command is no Python program that could be run in
        one. Its output goes into two files, or is read by who starts it."""
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
        from maya_core.launch.coordinator import Coordinator

        environment = {**os.environ, **self._environment}
        environment.pop(VARIABLE, None)
        if self._gpu is not None:  # with a line to somebody, as every emulated process has: it ends with us
            coordinator = self._until_end.enter_context(Coordinator())
            settings = ProcessSettings(
                gpu=self._gpu, gpus=self._gpus, steps=None, out=None, rank=None, coordinator=coordinator.socket
            )
            environment |= {VARIABLE: settings.model_dump_json()}
            environment.setdefault("OMP_NUM_THREADS", "1")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # torch first: where the emulation is on, that begins it.
        begin = (
            "import os; started = dict(os.environ); import torch; from maya_core.launch import fork_server; "
            f"fork_server.main({there.fileno()}, {list(self._modules)}, started)"
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
                "the process that ranks are forked from was killed: the run was ended, and there is no result.",
                "If the machine ran out of memory, emulate fewer ranks (--ranks) or give it more.",
            )
        what, pid, code = json.loads(said)
        return what, pid, code


def program_in(command: list[str]) -> tuple[str | None, str | None, list[str]] | None:
    """(script, module, arguments) of `python [-u] script.py ...` or `python [-u] -m module ...`; None of any other command."""
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
    """Modules that a script imports by name, anywhere in it: what its ranks would spend their first seconds on. The user's own modules are
    not among them: they may do anything when they are imported."""
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


def below(site: Site) -> Site:
    """A stack of a forked rank, outermost first, without what its program is called by."""
    ours = [place for place, frame in enumerate(site) if frame.file == __file__]
    return site[ours[-1] + 1 :] if ours else site


# ---- inside ----


def main(number: int, modules: list[str], started: dict[str, str]) -> None:
    """`started` is the environment at the start of the process."""
    for name in modules:
        with contextlib.suppress(Exception):  # the program itself will say what is missing
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=number)
    living: set[int] = set()
    while True:
        if select.select([line], [], [], POLL_S if living else None)[0]:
            request, files, _, _ = socket.recv_fds(line, LARGEST_REQUEST, 2)
            if not request:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                line.close()
                command, environment, folder = json.loads(request)
                _become(command, _with_ours(environment, started), folder, files)
            for file in files:
                os.close(file)
            living.add(pid)
            line.send(json.dumps(["started", pid, 0]).encode())
        for pid in list(living):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                living.remove(pid)
                with contextlib.suppress(OSError):
                    line.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())


def _with_ours(environment: dict[str, str], started: dict[str, str]) -> dict[str, str]:
    """With what the emulation has set (caches of its own, where nvidia-smi is), and modules when they were imported: neither happens again in a
    fork. What the fork is told otherwise than this process was, counts."""
    ours = {name: value for name, value in os.environ.items() if started.get(name) != value}
    return environment | {name: value for name, value in ours.items() if environment.get(name) == started.get(name)}


def _become(command: list[str], environment: dict[str, str], folder: str, files: list[int]) -> NoReturn:
    """This fork is the process that the command would have been, to its end."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for file, standard in zip(files, (1, 2), strict=True):
            os.dup2(file, standard)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # otherwise that of all forked ranks is one
        code = _run(command, _begin_emulation())
    finally:  # as the interpreter ends, but for what takes long: everything imported is not taken apart
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _begin_emulation() -> bool:
    """Whether it is on from now: it was on in the process that was forked."""
    from maya_core.device.emulated import EmulatedDevice
    from maya_core.session import process

    if EmulatedDevice.current is None:
        _import_torch_anew()
        return False
    process.in_this_process(ProcessSettings.model_validate_json(os.environ.pop(VARIABLE)))
    return True


def _run(command: list[str], emulated: bool) -> int:
    found = program_in(command)
    assert found is not None
    script, module, arguments = found
    sys.orig_argv[:] = command
    before = {name: os.environ.get(name) for name in READ_ONCE}
    code = 0
    try:
        if script is None:
            sys.argv[:] = [str(module), *arguments]
            sys.path[0] = os.getcwd()
            runpy.run_module(str(module), run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = [script, *arguments]
            sys.path[0] = str(Path(script).resolve().parent)
            path = os.path.abspath(script)
            program = types.ModuleType("__main__")
            program.__file__ = path
            program.__loader__ = SourceFileLoader("__main__", path)
            program.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
            sys.modules["__main__"] = program
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(program))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        inside = error.__traceback__
        error.__traceback__ = inside.tb_next if inside is not None else None  # the program's part of it
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if emulated and before != {name: os.environ.get(name) for name in READ_ONCE}:
        return NOT_HERE
    return code


def _import_torch_anew() -> None:
    """The program finds no torch yet. When it imports it, it gets what is there, as torch leaves it at the end of its import."""
    there = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    for name in there:
        del sys.modules[name]
    sys.meta_path.insert(0, _Torch(there))


class _Torch(MetaPathFinder, Loader):
    def __init__(self, modules: dict[str, types.ModuleType]) -> None:
        self._modules = modules
        self._spec: Any = modules["torch"].__spec__

    def find_spec(self, name: str, path: Any, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = ModuleSpec(name, self, origin=self._spec.origin, is_package=True)
        spec.submodule_search_locations = self._spec.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._modules["torch"]

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        module.__spec__ = self._spec
        activate()
