"""A program that only starts others: what they do on the GPU is the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from maya_core.session import children

MAYA = str(Path(sys.executable).parent / "maya")
TRAIN = """
import sys, torch
width = int(sys.argv[1])
layer = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(8):
    layer(torch.ones(4, width, device="cuda")).sum().backward()
    optimizer.step()
"""
DDP = """
import os, torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
BEGIN = "import os, subprocess, sys, torch\npython = sys.executable\n"
HERE = "\n" + TRAIN.replace("int(sys.argv[1])", "96")


def run(folder: Path, program: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    (folder / "train.py").write_text(TRAIN)
    (folder / "ddp.py").write_text(DDP)
    (folder / "program.py").write_text(BEGIN + program)
    done = subprocess.run(
        [MAYA, "run", "--json", "prediction.json", "--", "python", "program.py"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((folder / "prediction.json").read_text())


def weights(prediction: dict[str, Any]) -> int:
    return int(prediction["workload"]["trained_parameters"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run([python, 'train.py', '32'], check=True, env={'HOME': os.environ['HOME']})",
        "subprocess.run('bash -c \"python train.py 32\"', shell=True, check=True)",
        "torch.zeros(1).cuda(); subprocess.check_call([python, 'train.py', '32'])",
    ],
)
def test_a_program_that_another_starts_is_predicted(tmp_path: Path, start: str) -> None:
    _, prediction = run(tmp_path, start)
    assert prediction["trace"]["steps"] == 3
    assert weights(prediction) == 32 * 33
    assert not [caveat for caveat in prediction["caveats"] if "processes" in caveat]


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "os.system('torchrun --nproc-per-node=4 ddp.py')",
        "subprocess.Popen([python, '-m', 'torch.distributed.run', '--nproc-per-node=4', 'ddp.py']).communicate()",
        "os.execvp('torchrun', ['torchrun', '--nproc-per-node=4', 'ddp.py'])",
    ],
)
def test_ranks_that_a_program_starts_are_those_of_its_job(tmp_path: Path, start: str) -> None:
    _, prediction = run(tmp_path, start)
    assert prediction["trace"]["steps"] == 3
    assert prediction["world"]["size"] == 4
    assert prediction["world"]["emulated_ranks"] == [0]


@pytest.mark.slow
def test_processes_that_are_given_their_ranks_by_hand(tmp_path: Path) -> None:
    start = """
ranks = [
    subprocess.Popen([python, "ddp.py"], env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                     "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999"})
    for rank in range(2)
]
assert [rank.wait() for rank in ranks] == [0, 0]
"""
    _, prediction = run(tmp_path, start)
    assert prediction["world"]["size"] == 2
    assert prediction["world"]["emulated_ranks"] == [0, 1]


@pytest.mark.slow
def test_a_child_that_only_looks_at_the_gpu_is_no_part_of_the_training(tmp_path: Path) -> None:
    look = "import torch; torch.ones(9).cuda().sum(); print('sees', torch.cuda.get_device_name())"
    done, prediction = run(tmp_path, f'print(subprocess.check_output([python, "-c", "{look}"], text=True)){HERE}')
    assert "sees NVIDIA H100" in done.stdout
    assert weights(prediction) == 96 * 97
    assert not [caveat for caveat in prediction["caveats"] if "processes" in caveat]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "described"), [(HERE, 96), ("; subprocess.run([python, 'train.py', '64'])", 32)])
def test_several_trainings_are_told(tmp_path: Path, more: str, described: int) -> None:
    _, prediction = run(tmp_path, f"subprocess.run([python, 'train.py', '32'], check=True){more}")
    assert weights(prediction) == described * (described + 1)
    assert any(caveat.startswith("Several processes of the program") for caveat in prediction["caveats"])


@pytest.mark.slow
def test_a_second_job_is_not_started_and_said_so(tmp_path: Path) -> None:
    done, prediction = run(
        tmp_path, "for size in (4, 2): subprocess.run(['torchrun', f'--nproc-per-node={size}', 'ddp.py'], check=True)"
    )
    assert "a run has one job, so the ranks of this one are not started: ddp.py" in done.stderr
    assert prediction["world"]["size"] == 4


@pytest.mark.parametrize(
    ("words", "helper"),
    [
        (["-m", "torch._inductor.compile_worker"], True),
        ([f"{torch.__path__[0]}/_inductor/compile_worker/__main__.py", "--workers=4"], True),
        (["-m", "torch.utils.collect_env"], True),
        (["-m", "torch.distributed.run", "train.py"], False),
        (["-u", "-m", "torch.distributed.launch", "train.py"], False),
        ([f"{torch.__path__[0]}/distributed/run.py", "train.py"], False),
        (["-c", "import torch"], False),
        (["/somewhere/bin/maya", "run", "--", "python", "train.py"], True),
        (["-m", "torchtune"], False),
        (["train.py"], False),
    ],
)
def test_helpers_of_torch_are_not_emulated(words: list[str], helper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *words])
    assert children.is_helper() is helper


def test_a_python_without_maya_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").touch()
    python = str(tmp_path / "bin" / "python3.11")
    children._tell_foreign([python, "train.py"])
    children._tell_foreign([python, "train.py"])
    assert capsys.readouterr().err.count(f"{python} is a Python without Maya") == 1
    (site / "maya_emulator-1.dist-info").mkdir()
    children._tell_once.cache_clear()
    children._tell_foreign([python, "train.py"])
    children._tell_foreign(["git", "status"])
    children._tell_foreign([sys.executable, "train.py"])
    assert capsys.readouterr().err == ""
