"""How the launchers' flags are read, without starting a process."""

from __future__ import annotations

import pytest
from accelerate.commands import launch
from maya_launchers.accelerate import add_flags, is_launcher
from maya_launchers.flags import without_flags

from maya_core.patches import Patches


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("python /venv/bin/accelerate launch train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("python -u -m accelerate.commands.launch train.py", True),
        ("/home/accelerate/bin/python train.py", False),
        ("python train.py accelerate.txt", False),
    ],
)
def test_who_is_a_launcher(command: str, launcher: bool) -> None:
    assert is_launcher(command.split()) == launcher


def test_how_to_emulate_is_not_said_without_emulating(capsys: pytest.CaptureFixture[str]) -> None:
    """It would train for real."""
    patches = Patches()
    add_flags(patches, launch)
    try:
        args = launch.launch_command_parser().parse_args(["--emulate_gpu", "h200", "train.py"])
        with pytest.raises(SystemExit, match="--emulate-gpu needs --emulate"):
            launch.launch_command(args)
    finally:
        patches.undo()


@pytest.mark.parametrize(
    ("typed", "script_arguments", "left"),
    [
        ("a launch --emulate --multi_gpu t.py --emulate", 1, "a launch --multi_gpu t.py --emulate"),
        ("a launch --emulate --emulate-gpu a100 t.py --lr 1", 2, "a launch t.py --lr 1"),
        ("a launch --emulate_steps=5 --emulate t.py", 0, "a launch t.py"),
    ],
)
def test_what_is_launched(typed: str, script_arguments: int, left: str) -> None:
    assert without_flags(typed.split(), script_arguments) == left.split()
