"""Finds out which Python a command would use, and whether Maya and torch are installed for it: with the Python of an environment without Maya,
`maya run` could not emulate anything, and the program would train for real."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from maya_core.doctor.findings import Finding, State
from maya_core.errors import MayaError
from maya_core.installation import installation
from maya_core.launch import launchers, torchrun
from maya_core.launch.run import command_not_found, find_program, split_command
from maya_core.torch_seam.version import FIRST, LAST, text
from maya_core.version import __version__

# Commands that run a program in an environment of their own: `uv run train.py`.
RUNNERS = ("uv", "poetry", "pdm", "pipenv", "hatch", "rye", "pixi")
TIME_LIMIT_S = 10
# What the other Python is asked. It imports neither package: that would take seconds.
QUESTION = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
try: backends = [e.name for e in m.entry_points().select(group="torch.backends")]
except AttributeError: backends = []  # a Python older than any that Maya supports
print(json.dumps({"python": sys.version.split()[0], "executable": sys.executable, "maya": version("maya-emulator"),
    "importable": u.find_spec("maya_core") is not None, "torch": version("torch"), "found": "maya" in backends}))
"""


@dataclass(frozen=True)
class Interpreter:
    """The Python that a command uses: how to start it, and how that is known."""

    words: tuple[str, ...]
    reason: str

    @property
    def is_ours(self) -> bool:
        return self.words == (sys.executable,)


def command(given: list[str]) -> list[Finding]:
    """What is known about a command before it runs."""
    try:
        interpreter = interpreter_of(given)
    except MayaError as error:
        return [Finding("command", error.problem, State.PROBLEM, error.advice)]
    if interpreter is None:
        return _unknown(given)
    shown = shlex.join(interpreter.words)
    if interpreter.is_ours:
        return [Finding("interpreter", f"{shown}, the one of `maya`: {interpreter.reason}")]
    return [Finding("interpreter", f"{shown}: {interpreter.reason}"), *_other(interpreter)]


def interpreter_of(given: list[str]) -> Interpreter | None:
    """The Python that this command uses; None if the command does not tell."""
    words = split_command(given)
    if words[0] != given[0]:
        return Interpreter((words[0],), f"`maya run` uses it for a bare '{given[0]}'{_not_on_path(given[0])}")
    if torchrun.split(words) is not None:
        reason = f"`maya run` starts the ranks of {Path(words[0]).name} itself{_not_on_path(words[0])}"
        return Interpreter((torchrun.interpreter(),), reason)
    program = find_program(words[0])
    if program is None:
        raise command_not_found(words[0])
    name = Path(program).name
    if name.startswith("python"):
        return Interpreter((program,), "the command names it")
    if name in RUNNERS and words[1:2] == ["run"]:
        return Interpreter((program, *words[1 : _program_in(words)], "python"), f"what {name} runs Python with")
    named = shebang(Path(program))
    return Interpreter(named, f"the first line of {program} names it") if named is not None else None


def _not_on_path(name: str) -> str:
    """A remark, if the shell would run a command of this name from another environment than Maya's."""
    found = shutil.which(name)
    if found is None or os.path.samefile(Path(found).parent, Path(sys.executable).parent):
        return ""
    return f"; the packages of {found} are not used"


def _program_in(words: list[str]) -> int:
    """Where the program begins in the words of a runner, after its own options."""
    for at, word in enumerate(words[2:], 2):
        name = Path(word).name
        if name.startswith("python") or name.endswith(".py") or name in torchrun.NAMES or launchers.launcher_in([name]):
            return at
    return next((at for at, word in enumerate(words[2:], 2) if not word.startswith("-")), len(words))


def shebang(script: Path) -> tuple[str, ...] | None:
    """The Python in the first line of a script; None if it is no script of Python's."""
    with script.open("rb") as file:
        first, second = file.readline(1024), file.readline(1024)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "sh" and second.startswith(b"'''exec'"):  # how pip writes paths with spaces
        words = shlex.split(second.decode(errors="replace").removeprefix("'''exec'"))[:1]
    if words and Path(words[0]).name == "env":
        names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words = [found] if names and (found := shutil.which(names[0])) is not None else names
    return (words[0],) if words and Path(words[0]).name.startswith("python") else None


def _other(interpreter: Interpreter) -> list[Finding]:
    """Whether Maya and torch are installed for another Python."""
    try:
        done = subprocess.run(
            [*interpreter.words, "-c", QUESTION], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
        known = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        slow = f"it did not answer within {TIME_LIMIT_S} s"
        return [
            Finding(
                "its packages",
                slow,
                State.WARNING,
                f"Try: {shlex.join(interpreter.words)} -c 'import maya_core, torch'",
            )
        ]
    except OSError as error:
        return [Finding("its packages", f"it does not start: {error.strerror}", State.PROBLEM)]
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = f"Try: {shlex.join(interpreter.words)} -c 'import maya_core, torch'"
        return [Finding("its packages", f"not known: {last}", State.PROBLEM, advice)]
    return [Finding("its Python", f"{known['python']}, {known['executable']}"), _its_maya(known), _its_torch(known)]


def _its_maya(known: dict[str, str | None]) -> Finding:
    if not known["importable"] or not known["found"]:
        outcome = "train for real" if known["torch"] is not None else "fail"
        what = f"not installed for it: the program would not be emulated, but {outcome}"
        line = installation().install_line().removeprefix("pip ")
        advice = f"Run: {known['executable']} -m pip {line}"
        return Finding("its Maya", what, State.PROBLEM, f"{advice}, or give the command with a Python that has Maya.")
    if known["maya"] != __version__:
        what = f"{known['maya']}, another version than that of this `maya`, {__version__}"
        return Finding("its Maya", what, State.WARNING, f"Use the `maya` of that environment: {_beside(known)}")
    return Finding("its Maya", str(known["maya"]))


def _beside(known: dict[str, str | None]) -> str:
    return str(Path(str(known["executable"])).with_name("maya"))


def _its_torch(known: dict[str, str | None]) -> Finding:
    version = known["torch"]
    if version is None:
        return Finding("its torch", "not installed for it", State.PROBLEM, f"Install torch for {known['executable']}.")
    major, minor = (int(part) for part in version.split(".")[:2])
    if not FIRST <= (major, minor) <= LAST:
        problem = f"{version} is not supported"
        return Finding(
            "its torch",
            problem,
            State.PROBLEM,
            f"Install torch {text(FIRST)} to {text(LAST)} for {known['executable']}.",
        )
    return Finding("its torch", version)


def _unknown(given: list[str]) -> list[Finding]:
    """A program that is not Python's: what it starts most likely uses the first python on PATH."""
    program = find_program(given[0])
    what = f"{program} is no script of Python's, so which Python it starts is not known"
    found = shutil.which("python") or shutil.which("python3")
    if found is None:
        return [
            Finding("interpreter", f"{what}; there is none on PATH", State.WARNING, "Put Maya's environment on PATH.")
        ]
    first = Interpreter((found,), "")
    lines = [Finding("interpreter", f"{what}. The first on PATH is {found}")]
    if os.path.samefile(Path(found).parent, Path(sys.executable).parent):
        return lines
    return [*lines, *(_as_warning(one) for one in _other(first))]


def _as_warning(finding: Finding) -> Finding:
    state = State.WARNING if finding.state is State.PROBLEM else finding.state
    return Finding(finding.subject, finding.found, state, finding.advice)
