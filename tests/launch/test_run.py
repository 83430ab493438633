"""`maya run` as users run it: an unmodified script in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from maya_here import refused

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_gpt.py")
SMALL = ["--layers", "2", "--width", "128", "--heads", "4", "--context", "64"]

SCRIPT = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step + 1)
print("finished")
"""


def maya(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "120", **environment}
    return subprocess.run(
        [MAYA, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def test_an_unmodified_script(tmp_path: Path) -> None:
    done = maya("run", "--gpu", "a100", "--json", "prediction.json", "--", "python", EXAMPLE, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "training on NVIDIA A100-SXM4-80GB" in done.stdout
    assert "fits" in done.stdout
    prediction = json.loads((tmp_path / "prediction.json").read_text())
    assert prediction["trace"]["steps"] == 3
    assert prediction["trace"]["ended"] == "stopped"
    assert prediction["trace"]["kernels_per_step"] > 50
    assert 0 < prediction["step_time_s"] < 1
    assert (tmp_path / "maya-out" / "latest" / "prediction.json").read_text() == (
        tmp_path / "prediction.json"
    ).read_text()
    assert (tmp_path / "maya-out" / "latest" / "rank-00000.trace").exists()


def test_steps(tmp_path: Path) -> None:
    train = script(tmp_path, SCRIPT.format(optimizer="SGD"))
    default = maya("run", "--", "python", train, cwd=tmp_path)
    assert "step 2" in default.stdout
    assert "step 3" not in default.stdout.split("emulated")[0]
    assert "3 steps, then stopped as requested" in default.stdout
    everything = maya("run", "--steps", "all", "--", "python", train, cwd=tmp_path)
    assert "finished" in everything.stdout
    assert "10 steps, the program ran to its end" in everything.stdout
    wrong = maya("run", "--steps", "some", "--", "python", train, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--steps some" in wrong.stderr


def test_the_same_command_gives_the_same_numbers(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert maya("run", "--json", name, "--", "python", EXAMPLE, *SMALL, cwd=tmp_path).returncode == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_failing_script_shows_its_own_traceback(tmp_path: Path) -> None:
    train = script(tmp_path, "import torch\ntorch.ones(1, device='cuda')\nraise ValueError('my own mistake')\n")
    done = maya("run", "--", "python", train, cwd=tmp_path)
    assert done.returncode == 1
    assert 'File "' in done.stderr
    assert "ValueError: my own mistake" in done.stderr
    assert "maya_core" not in done.stderr
    assert "failed" in done.stdout


def test_running_out_of_memory_is_said_plainly(tmp_path: Path) -> None:
    done = maya("run", "--gpu", "v100", "--", "python", EXAMPLE, "--batch", "64", cwd=tmp_path)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "DOES NOT FIT" in done.stdout


CATCHES = """
import sys, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = 2**33
while rows:
    try:
        model(torch.ones(rows, 64, device="cuda")).sum().backward()
    except torch.OutOfMemoryError:
        rows = {then}
        continue
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("then", "code", "ended", "fits"),
    [
        ("sys.exit(1)", 1, "failed", False),
        ("0", 0, "completed", False),  # ends in peace, and has trained nothing
        ("1024", 0, "stopped", True),  # goes on with what fits
    ],
)
def test_running_out_of_memory_where_the_program_catches_it(
    then: str, code: int, ended: str, fits: bool, tmp_path: Path
) -> None:
    done = maya("run", "--json", "told.json", "--", "python", script(tmp_path, CATCHES.format(then=then)), cwd=tmp_path)
    assert done.returncode == code
    maya("report", "maya-out", "--json", "again.json", cwd=tmp_path)
    for name in ("told.json", "again.json"):
        told = json.loads((tmp_path / name).read_text())
        assert (told["trace"]["ended"], told["memory"]["fits"]) == (ended, fits)


def test_a_program_that_gives_up_has_not_come_to_its_end(tmp_path: Path) -> None:
    """As one does whose arguments are wrong: it raises nothing that would be seen."""
    text = "import argparse, torch\nx = torch.ones(8).cuda()\nargparse.ArgumentParser().parse_args()\n"
    done = maya("run", "--", "python", script(tmp_path, text), "--lr", "1", cwd=tmp_path)
    assert done.returncode == 2 and "unrecognized arguments" in done.stderr
    assert "0 steps, then the program failed" in done.stdout and "not known to fit" in done.stdout


def test_a_run_leaves_what_stands_beside_it_alone(tmp_path: Path) -> None:
    train = script(tmp_path, SCRIPT.format(optimizer="SGD"))
    precious = tmp_path / "results"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    assert maya("run", "--out", "results", "--", "python", train, cwd=tmp_path).returncode == 0
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert maya("run", "--out", "results/thesis.txt", "--", "python", train, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h10", "--", "python", "train.py"], "unknown GPU 'h10'"),
        (["--", "pyton", "train.py"], "command not found: 'pyton'"),
        (["--gpuu", "h100", "--", "python", "train.py"], "there is no option --gpuu"),
        (["--", "true"], "left no trace"),
    ],
)
def test_bad_use_gets_a_sentence(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = refused("run", *arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.exit_code == 2
    assert message in done.stderr


def test_one_step_asked_for_is_one_step_run(tmp_path: Path) -> None:
    text = """
import torch
models = [torch.nn.Linear(8, 8).cuda() for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for step in range(3):
    for number, (model, optimizer) in enumerate(zip(models, optimizers)):
        print(f"step {step}, optimizer {number}", flush=True)
        model(torch.ones(1, 8, device="cuda")).sum().backward()
        optimizer.step()
"""
    done = maya("run", "--steps", "1", "--", "python", script(tmp_path, text), cwd=tmp_path)
    assert "1 step, then stopped as requested" in done.stdout
    assert "step 0, optimizer 1" in done.stdout and "step 1, optimizer 0" not in done.stdout


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    text = """
import torch
a, b = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
first, second = torch.optim.SGD(a.parameters(), lr=.1), torch.optim.Adam(b.parameters())
for i in range(5):
    b(a(torch.randn(4, 8, device="cuda"))).sum().backward()
    first.step(); second.step(); first.zero_grad(); second.zero_grad()
    print("round", i + 1)
"""
    done = maya("run", "--steps", "2", "--", "python", script(tmp_path, text), cwd=tmp_path)
    assert "2 steps, then stopped as requested" in done.stdout
    assert "round 1" in done.stdout
    assert "round 2" not in done.stdout


def test_a_subprocess_of_the_script_sees_the_gpu_and_is_no_part_of_the_training(tmp_path: Path) -> None:
    text = SCRIPT.format(optimizer="SGD") + "\n"
    text = (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import torch; print(torch.cuda.is_available())'], capture_output=True, text=True).stdout)\n"
        + text
    )
    text = "import torch\n" + text
    done = maya("run", "--", "python", script(tmp_path, text), cwd=tmp_path)
    assert "True" in done.stdout
    assert "3 steps" in done.stdout


def test_gpus_are_listed(tmp_path: Path) -> None:
    done = maya("gpus", cwd=tmp_path)
    assert "NVIDIA H100 80GB HBM3" in done.stdout
    assert "79.2 GiB" in done.stdout


def test_inactive_maya_changes_nothing() -> None:
    code = "import torch, sys; print(torch.cuda.is_available(), 'maya_core.session.process' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
