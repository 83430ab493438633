"""`maya report` and `maya what-if` on recorded runs, as a user types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).with_name("maya"))
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def maya(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "140", **environment}
    return subprocess.run(
        [MAYA, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT)
    launcher = ("torchrun", "--nnodes", "2", "--nproc-per-node", "8")
    secrets = ("--api-key", "topsecret1", "--hub_token=topsecret2", "--url", "https://me:topsecret3@host/x")
    done = maya(
        "run", "--gpu", "a100", "--out", "out", "--", *launcher, "train.py", *secrets, cwd=folder, HF_TOKEN="topsecret4"
    )
    assert done.returncode == 0, done.stderr
    assert "step time" in done.stdout and "MFU" in done.stdout and "per 1,000 steps" in done.stdout
    return folder


def test_nothing_secret_is_kept(recorded: Path) -> None:
    job = json.loads((recorded / "out" / "latest" / "job.json").read_text())
    assert job["command"][-5:] == ["--api-key", "***", "--hub_token=***", "--url", "https://***@host/x"]
    for path in (recorded / "out" / "latest").iterdir():
        assert b"topsecret" not in path.read_bytes()
        assert not path.name.endswith((".pkl", ".pickle", ".pt"))


def test_the_report_says_what_the_run_said(recorded: Path, tmp_path: Path) -> None:
    done = maya("report", str(recorded / "out"), "--json", "again.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.json").read_bytes() == (recorded / "out" / "latest" / "prediction.json").read_bytes()


def test_other_gpus_side_by_side(recorded: Path, tmp_path: Path) -> None:
    done = maya("what-if", str(recorded / "out"), "--gpu", "h100", "--gpu", "v100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as recorded" in done.stdout and "16 x h100" in done.stdout and "16 x v100" in done.stdout
    assert not list(tmp_path.iterdir())


def test_another_network_is_slower_and_a_price_of_ones_own_counts(recorded: Path, tmp_path: Path) -> None:
    def step(*options: str) -> dict:
        done = maya("what-if", str(recorded / "out"), *options, "--json", "p.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "p.json").read_text())

    slow, fast = step("--network", "ethernet-25"), step("--network", "infiniband-ndr")
    assert slow["step_time_s"] > 1.5 * fast["step_time_s"]
    assert slow["cluster"]["network"] == "ethernet-25"
    priced = step("--price-per-gpu-hour", "1.5")
    assert priced["cost"]["usd_per_hour"] == 24.0
    spread = step("--nodes", "4", "--gpus-per-node", "4")
    assert (spread["world"]["size"], spread["step_time_s"] > 0) == (16, True)


def test_node_and_network_of_the_run_are_kept(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = ("torchrun", "--nnodes", "2", "--nproc-per-node", "8")
    done = maya("run", "--node", "p4d.24xlarge", "--network", "ethernet-25", "--", *launcher, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert maya("report", "maya-out", "--json", "again.json", cwd=tmp_path).returncode == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert (again["cluster"]["node"], again["cluster"]["network"]) == ("p4d.24xlarge", "ethernet-25")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "maya-out" / "latest" / "prediction.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nodes", "4", "--gpus-per-node", "8"), "4 nodes of 8 are 32 GPUs, but the job was recorded on 16"),
        (("--nodes", "3"), "the program itself would change"),
        (("--gpu", "h1000"), "h1000"),
        (("--network", "carrier-pigeon"), "carrier-pigeon"),
        (("--gpu", "h100", "--attention", "flash9"), "attention 'flash9' is not known"),
        (("--gpu", "a100", "--attention", "flash3"), "runs on Hopper"),
        ((), "nothing to change"),
    ],
)
def test_what_cannot_be_told_is_refused(recorded: Path, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    done = maya("what-if", str(recorded / "out"), *options, cwd=tmp_path)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_another_world_size_gets_the_command_that_emulates_it(recorded: Path, tmp_path: Path) -> None:
    done = maya("what-if", str(recorded / "out"), "--nodes", "4", "--gpus-per-node", "8", cwd=tmp_path)
    told = " ".join(done.stderr.split())
    assert "maya run --gpu a100 -- torchrun --nnodes 2 --nproc-per-node 8 train.py" in told
    assert "--nnodes 4 --nproc-per-node 8" in told


@pytest.mark.parametrize("damage", ["truncated", "newer", "no manifest", "missing"])
def test_damaged_runs_are_refused_and_nothing_is_written(recorded: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(recorded / "out" / "latest", folder)
    trace = folder / "rank-00000.trace"
    if damage == "truncated":
        trace.write_bytes(trace.read_bytes()[:1000])
    elif damage == "newer":
        manifest = json.loads((folder / "job.json").read_text())
        (folder / "job.json").write_text(json.dumps({**manifest, "version": 99}))
    elif damage == "no manifest":
        (folder / "job.json").unlink()
    else:
        folder = tmp_path / "elsewhere"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for command in (("report", str(folder), "--html", "page.html"), ("what-if", str(folder), "--gpu", "h100")):
        done = maya(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr and done.stderr.startswith("maya:")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_files_of_the_users_are_left_alone(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("precious")
    (tmp_path / "config.json").write_text("{}")
    options = {"--json": "train.py", "--html": "train.py", "--timeline": "config.json", "--memory-snapshot": "train.py"}
    for option, name in options.items():
        done = maya("report", str(recorded / "out"), option, name, cwd=tmp_path)
        assert done.returncode == 2
        assert "will not be overwritten" in done.stderr
    assert (tmp_path / "train.py").read_text() == "precious"


def test_all_files_at_once_and_again_over_themselves(recorded: Path, tmp_path: Path) -> None:
    names = {"--json": "p.json", "--html": "r.html", "--timeline": "t.json.gz", "--memory-snapshot": "m.pickle"}
    options = [word for pair in names.items() for word in pair]
    before: dict[str, bytes] = {}
    for _ in range(2):
        done = maya("report", str(recorded / "out"), *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert set(files) == set(names.values())
        assert before in ({}, files)  # the same bytes
        before = files


GLOO = SCRIPT.replace('"nccl"', '"gloo"')
BROADCAST = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
weight = torch.ones(64, 64, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(6):
    if dist.get_rank() == 0:
        (weight @ weight).sum().backward()
        optimizer.step()
    dist.broadcast(weight.detach(), 0)
"""


@pytest.mark.parametrize(
    ("script", "options"),
    [(GLOO, []), (BROADCAST, ["--ranks", "all", "--steps", "all"])],
    ids=["ddp over gloo", "a rank that takes no steps"],
)
def test_other_kinds_of_job_have_a_step_time(tmp_path: Path, script: str, options: list[str]) -> None:
    (tmp_path / "train.py").write_text(script)
    launcher = ("torchrun", "--nproc-per-node", "2")
    done = maya("run", *options, "--json", "p.json", "--", *launcher, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "p.json").read_text())["step_time_s"] > 0
