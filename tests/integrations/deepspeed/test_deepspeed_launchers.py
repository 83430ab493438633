"""`deepspeed`'s flags and hosts, and what is refused, in this process."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from maya_deepspeed.job import program_of, rank_environment, world_of
from maya_deepspeed.launch import hosts_of
from maya_deepspeed.refused import refusals
from maya_launchers.deepspeed import add_flags, is_launcher
from packaging.version import Version

from maya_core.errors import MayaError
from maya_core.launch.world import World
from maya_core.patches import Patches
from maya_core.request import Request


@pytest.fixture
def runner() -> Iterator[ModuleType]:
    """deepspeed.launcher.runner, with Maya's flags on it."""
    from deepspeed.launcher import runner

    patches = Patches()
    add_flags(patches, runner)
    yield runner
    patches.undo()


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("python /venv/bin/deepspeed train.py", True),
        ("python -u /venv/bin/deepspeed train.py", True),
        ("/home/deepspeed/bin/python train.py", False),
        ("python train.py --deepspeed", False),
    ],
)
def test_who_is_a_launcher(command: str, launcher: bool) -> None:
    assert is_launcher(command.split()) == launcher


def test_flags(runner: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit):
        runner.parse_args(["--help"])
    shown = capsys.readouterr().out
    for flag in (
        "--emulate ",
        "--emulate-gpu GPU, --emulate_gpu GPU",
        "--emulate-steps N",
        "--emulate-out DIR",
        "--emulate-mlflow",
    ):
        assert flag in shown
    with pytest.raises(SystemExit) as ended:
        runner.parse_args(["--emulate_gpu", "a100", "train.py"])
    assert ended.value.code == 2
    assert "--emulate-gpu needs --emulate" in capsys.readouterr().err
    plain = runner.parse_args(["--num_gpus", "4", "train.py", "--emulate"])
    assert not {name for name in vars(plain) if name.startswith("emulate")}  # the rest of DeepSpeed knows of none
    assert plain.user_args == ["--emulate"]


@pytest.mark.parametrize("flag", ["--emulate-gpu", "--emulate_gpu"])
def test_emulate_is_maya_run_of_the_same_command(
    flag: str, runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Became(Exception):
        pass

    def become(program: str, command: list[str]) -> None:
        raise Became(command)

    ours = ["--emulate", flag, "b200", "--num_gpus=4", "--emulate-out=there", "--emulate-mlflow"]
    words = [*ours, "train.py", "--emulate", flag, "mine"]
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(sys, "orig_argv", ["python", "/venv/bin/deepspeed", *words])
    with pytest.raises(Became) as became:
        runner.parse_args(words)
    command = became.value.args[0][3:]
    assert command[:7] == ["run", "--gpu", "b200", "--out", "there", "--mlflow", "--"]
    assert command[8:] == ["/venv/bin/deepspeed", "--num_gpus=4", "train.py", "--emulate", flag, "mine"]


def test_hosts(runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nnode-a slots=8\nnode-b slots=8\nnode-c slots=8\n")

    def found(*words: str, nodes: int | None = None) -> dict[str, list[int]]:
        return hosts_of(Request(gpu="h100", nodes=nodes), runner, runner.parse_args([*words, "train.py"]))

    eight = list(range(8))
    assert found() == {"localhost": eight}  # all of a node that has this GPU
    assert found("--num_gpus", "2", "--num_nodes", "2") == {"worker-0": [0, 1], "worker-1": [0, 1]}
    assert found("--hostfile", str(hosts), "--exclude", "node-b") == {"node-a": eight, "node-c": eight}
    assert found("--hostfile", str(hosts), "--include", "node-a:0,1@node-c:2,3") == {"node-a": [0, 1], "node-c": [2, 3]}
    assert found("--hostfile", str(hosts), "--num_nodes", "1") == {"node-a": eight}
    with pytest.raises(MayaError, match="deepspeed: Hostname 'worker-9' not found in hostfile"):
        found("--include", "localhost:0,1@worker-9:0")
    with pytest.raises(MayaError, match="given --nodes 4, but deepspeed uses 3"):
        found("--hostfile", str(hosts), nodes=4)
    with pytest.raises(MayaError, match="a has 4 GPUs and b has 1"):
        world_of({"a": [0, 1, 2, 3], "b": [0]})


def test_a_rank_is_told_what_deepspeed_tells_it() -> None:
    args = Namespace(
        master_addr="10.0.0.1", master_port=5000, no_python=False, module=True, user_script="my.train", user_args=["-x"]
    )
    hosts = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    assert world_of(hosts) == World(2, 4)
    told = rank_environment(args, hosts, World(2, 4), 6)
    assert told == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_SIZE": "4",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5000",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }
    assert program_of(args, 2)[1:] == ["-u", "-m", "my.train", "--local_rank=2", "-x"]


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}},
            "offload_optimizer to NVMe",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload",
            marks=pytest.mark.skipif(
                Version(version("deepspeed")) < Version("0.18"), reason="DeepSpeed has SuperOffload since 0.18"
            ),
        ),
        ({"compile": {"deepcompile": True}}, "deepcompile"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, None),
        ({"autotuning": {"enabled": True}}, None),
    ],
)
def test_refused(config: dict[str, object], refused: str | None) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    found = [error.problem for error in refusals(DeepSpeedConfig({"train_batch_size": 1, **config}))]
    assert [refused in problem for problem in found] == [True] if refused else not found
