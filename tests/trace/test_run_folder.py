"""Every run has a folder of its own; two at once never meet; what a user names is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import maya_core
from maya_core.trace.run_folder import find_run, keep_newest, new_run, runs_in, state_of

MAYA = str(Path(sys.executable).with_name("maya"))
LAYER = """
import sys, torch
layer = torch.nn.Linear(int(sys.argv[1]), 256).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(4):
    layer(torch.randn(8, int(sys.argv[1]), device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def finish(folder: Path) -> None:
    (folder / "job.json").write_text("{}")


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    with (
        new_run(tmp_path, ["python", "train.py"], "h100") as first,
        new_run(tmp_path, ["python", "train.py"], "a100") as second,
    ):
        assert first.path != second.path
        assert all(run.path.name.partition("-train")[1] for run in (first, second))
        assert state_of(first.path) == "running"
        finish(first.path)
    assert [state_of(folder) for folder in runs_in(tmp_path)] == ["finished", "unfinished"]
    assert find_run(tmp_path) == first.path  # the second left no job
    assert (tmp_path / "latest").resolve() == first.path


def test_the_newest_run_is_found_without_links(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with new_run(tmp_path, [], "h100", name) as run:
            if name != "c":
                finish(run.path)
    (tmp_path / "latest").unlink()
    assert find_run(tmp_path) == tmp_path / "b"
    assert find_run(tmp_path / "a") == tmp_path / "a"


def test_a_folder_of_the_user_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "notes.txt").write_text("mine")
    with new_run(tmp_path, [], "h100", "a") as run:
        finish(run.path)
    assert (tmp_path / "latest" / "notes.txt").read_text() == "mine"
    assert find_run(tmp_path) == tmp_path / "a"


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_run(Path("maya-out"), [], "h100", "base").release()
    with pytest.raises(maya_core.MayaError, match="runs are never overwritten"):
        new_run(Path("maya-out"), [], "h100", "base")
    assert find_run(Path("base")) == Path("maya-out/base")
    for wrong in ("latest", "../up", "a/b", ".hidden", ""):
        with pytest.raises(maya_core.MayaError, match="cannot be a run's name"):
            new_run(Path("maya-out"), [], "h100", wrong)
    (tmp_path / "file").touch()
    with pytest.raises(maya_core.MayaError, match="is a file"):
        new_run(tmp_path / "file", [], "h100")


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (["torchrun", "--nproc-per-node", "8", "deep/train_it.py", "--out", "x"], "train_it"),
        (["/usr/bin/python3", "-m", "my.package", "x"], "my.package"),
        (["python", "-m", "torch.distributed.run", "-m", "pkg.main"], "pkg.main"),
        (["bash", "-c", "python x.py && echo"], "bash"),
        (["composer"], "composer"),
        ([], "run"),
    ],
)
def test_a_run_is_called_after_its_program(tmp_path: Path, command: list[str], label: str) -> None:
    with new_run(tmp_path, command, "h100") as run:
        assert run.path.name.split("-", 2)[2] == label


def test_old_runs_are_removed_only_on_request_and_never_others(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        new_run(tmp_path, [], "h100", name).release()
    (tmp_path / "data").mkdir()
    with new_run(tmp_path, [], "h100", "d"):
        assert [folder.name for folder in keep_newest(tmp_path, 2)] == ["a", "b"]
        new_run(tmp_path, [], "h100", "e").release()
        assert [folder.name for folder in keep_newest(tmp_path, 1)] == ["c"]  # d is running
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "data", "e"]


def test_a_block_keeps_its_job(tmp_path: Path) -> None:
    import torch

    with maya_core.emulate("h100", out=tmp_path, node="p5.48xlarge") as job:
        torch.ones(5, device="cuda")
    assert job.folder == find_run(tmp_path)
    assert maya_core.read_job(tmp_path).node == "p5.48xlarge"
    with maya_core.emulate("h100") as job:
        pass
    assert job.folder is None


@pytest.mark.slow
def test_two_runs_at_once_keep_their_own_predictions(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAYER)

    def start(width: int) -> subprocess.Popen[str]:
        command = [MAYA, "run", "--gpu", "h100", "--json", f"{width}.json", "--", "python", "train.py", str(width)]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    runs = {width: start(width) for width in (256, 4096)}
    outputs = {width: run.communicate(timeout=300)[0] for width, run in runs.items()}
    assert [run.returncode for run in runs.values()] == [0, 0], outputs
    used = {}
    for width in runs:
        alone = json.loads((tmp_path / f"{width}.json").read_text())
        [kept] = [
            folder
            for folder in runs_in(tmp_path / "maya-out")
            if str(width) in json.loads((folder / "run.json").read_text())["command"]
        ]
        assert json.loads((kept / "prediction.json").read_text()) == alone
        used[width] = alone["memory"]["ranks"][0]["by_category_bytes"]["parameters"]
    assert used == {256: 4 * (256 * 256 + 256), 4096: 4 * (4096 * 256 + 256)}

    listed = subprocess.run(
        [MAYA, "runs", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    rows = json.loads(listed.stdout)
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert all(row["verdict"] == "fits" and row["step_time_s"] > 0 and row["gpu"] == "h100" for row in rows)
    table = subprocess.run([MAYA, "runs"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "COLUMNS": "160"})  # fmt: skip
    assert "python3 train.py 4096" in table.stdout or "python train.py 4096" in table.stdout
    for row in rows:
        assert row["name"] in table.stdout


@pytest.mark.slow
def test_a_run_that_goes_on_and_one_that_was_killed_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import torch, time\ntorch.ones(3).cuda()\nprint('here', flush=True)\ntime.sleep(300)\n"
    )
    run = subprocess.Popen(
        [MAYA, "run", "--name", "long", "--", "python", "wait.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert "here" in run.stdout.readline()

    def told() -> tuple[str, str]:
        report = subprocess.run([MAYA, "report"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert report.returncode == 2
        listed = subprocess.run(
            [MAYA, "runs", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        [row] = json.loads(listed.stdout)
        return row["state"], " ".join(report.stderr.split())

    assert told()[0] == "running"
    run.kill()
    run.wait()
    until = time.monotonic() + 30
    while told()[0] == "running" and time.monotonic() < until:
        time.sleep(0.2)
    assert told()[0] == "unfinished"
    wrong = subprocess.run(
        [MAYA, "report", "long"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "did not finish" in " ".join(wrong.stderr.split())
