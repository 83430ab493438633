"""Launchers of other projects: commands that start a job's ranks themselves. Their integrations take part by entry points, one for each name
that the command goes by:

    [project.entry-points."maya.launchers"]
    mylauncher = "maya_mylauncher.command:requested_world"

The function receives the command's words, and returns the nodes and the GPUs per node that it asks for, each None if it does not say.
Under `maya run` the integration hands the launcher the emulated cluster; without one, Maya itself would start the command once per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "maya.launchers"

RequestedWorld = Callable[[list[str]], tuple[int | None, int | None]]


def launcher_in(command: list[str]) -> str | None:
    """The launcher that a command calls, directly or by Python."""
    words = command
    if Path(words[0]).name.startswith("python"):
        words = [word for word in words[1:4] if word not in ("-u", "-B", "-O", "-m")]
    name = Path(words[0]).name if words else ""
    return name if name in entry_points(group=GROUP).names else None


def requested_world(command: list[str]) -> tuple[int | None, int | None]:
    """The nodes and the GPUs per node that a launcher's command asks for."""
    name = launcher_in(command)
    if name is None:
        return None, None
    requested: RequestedWorld = next(iter(entry_points(group=GROUP, name=name))).load()
    return requested(command)
