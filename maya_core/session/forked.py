"""The process behind a `ForkServer`: it imports modules, forks a rank for each request, and reports when one has ended. A fork becomes the
process that its command would have been.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from maya_core.device.emulated import EmulatedDevice
from maya_core.launch.fork_server import LARGEST_REQUEST, NOT_HERE, POLL_S, READ_ONCE, program_in
from maya_core.launch.settings import VARIABLE, ProcessSettings
from maya_core.overlay import files as overlay
from maya_core.session import process
from maya_core.session.autoload import activate


def main(number: int, modules: list[str], started: dict[str, str]) -> None:
    """Serves the socket of that number. `started` is the environment at the start of the process."""
    for name in modules:
        with contextlib.suppress(Exception):  # the program itself will report what is missing
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
    """The fork's environment, with the variables that the emulation and imported modules have set here (cache folders, the path of nvidia-smi),
    for neither happens again in a fork. Where the fork's own value differs from what this process was started with, it counts."""
    ours = {name: value for name, value in os.environ.items() if started.get(name) != value}
    return environment | {name: value for name, value in ours.items() if environment.get(name) == started.get(name)}


def _become(command: list[str], environment: dict[str, str], folder: str, files: list[int]) -> NoReturn:
    """Turns this fork into the process that the command would have been, to its end."""
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
        if overlay.is_on():
            overlay.start(os.environ)
        code = _run(command, _begin_emulation())
    finally:  # as the interpreter ends, except that imported modules are not taken apart, which takes long
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _begin_emulation() -> bool:
    """Continues the emulation of the forked process, if it was on there. Whether it is on now."""
    if EmulatedDevice.current is None:
        _import_torch_anew()
        return False
    process.in_this_process(ProcessSettings.model_validate_json(os.environ[VARIABLE]))
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
    """Hides torch until the program imports it, which then costs nothing and switches the emulation on."""
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
