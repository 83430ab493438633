"""Everything that `maya doctor` looks at, in the order in which it is printed."""

from __future__ import annotations

from maya_core.doctor import command, environment, packages
from maya_core.doctor.findings import Report


def diagnose(given: list[str] | None = None) -> Report:
    """The findings about this environment, and about a command if one is given."""
    report = {
        "Python and Maya": environment.python_and_maya(),
        "torch": environment.torch(),
        "Compiler": environment.compiling(),
        "Cache of compiled code": environment.cache(),
        "This machine": environment.machine(),
        "Optional packages": packages.optional_packages(),
    }
    return {**report, "Command": command.command(given)} if given else report
