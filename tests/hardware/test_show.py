"""`maya gpus`, and the user's own hardware file in programs that `maya run` starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")
OWN = '[gpus.my-h100]\nbase = "h100"\npower_limit_w = 500\nmemory_bytes = "70GiB"\ndriver_name = "Mine"\n'


def maya(*arguments: str, cwd: Path, columns: int = 80, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": str(columns), **environment}
    return subprocess.run(
        [MAYA, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("columns", [80, 120, 150, 160])
@pytest.mark.parametrize("arguments", [(), ("--nodes",), ("--networks",), ("b200",)])
def test_nothing_is_cut_off(tmp_path: Path, columns: int, arguments: tuple[str, ...]) -> None:
    done = maya("gpus", *arguments, cwd=tmp_path, columns=columns)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "…" not in done.stdout


def test_the_list(tmp_path: Path) -> None:
    lines = maya("gpus", cwd=tmp_path).stdout.splitlines()
    (h100,) = [line.split() for line in lines if line.split()[:1] == ["h100"]]
    assert h100 == ["h100", "79.2", "3.35", "989", "700", "450", "3.29", "runpod"]
    assert "h100-sxm, h100-sxm5," in maya("gpus", cwd=tmp_path, columns=150).stdout
    (wide,) = [line for line in maya("gpus", cwd=tmp_path, columns=160).stdout.splitlines() if " NVIDIA H200 " in line]
    assert " ".join(wide.split()) == (
        "h200 NVIDIA H200 139.8 GiB 4.8 TB/s 989 700 450 GB/s 4.50 nebius 2026-07 h200-sxm, h200-sxm5, h200-141gb"
    )


def test_one_gpu_with_its_sources_nodes_and_prices(tmp_path: Path) -> None:
    shown = maya("gpus", "H100", cwd=tmp_path, columns=160).stdout
    assert "NVIDIA H100 80GB HBM3, hopper, compute capability 9.0" in shown
    assert "79.18 GiB for a program" in shown
    assert "p5.48xlarge" in shown
    assert "h100-datasheet" in shown
    assert "NVIDIA H100 Tensor Core GPU data sheet" in shown
    assert "6.88" in shown  # 55.04 by 8


def test_json(tmp_path: Path) -> None:
    gpus = json.loads(maya("gpus", "--json", cwd=tmp_path).stdout)
    assert gpus["h100"]["memory_bytes"] == 85017493504
    assert gpus["h100"]["prices"][0]["usd_per_gpu_hour"] == 3.29
    one = json.loads(maya("gpus", "h100", "--json", cwd=tmp_path).stdout)
    assert one["source_list"]["cuda-guide"]["publisher"] == "NVIDIA"
    assert "p5.48xlarge" in [node["name"] for node in one["nodes"]]
    assert json.loads(maya("gpus", "--nodes", "--json", cwd=tmp_path).stdout)["gb200-nvl72"]["nvlink_domain"] == 72
    assert (
        json.loads(maya("gpus", "--networks", "--json", cwd=tmp_path).stdout)["infiniband-ndr"]["bytes_per_s"] == 50e9
    )


def test_the_users_own_entries_are_marked(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    shown = maya("gpus", "--hardware", "own.toml", cwd=tmp_path).stdout
    assert "my-h100 *" in shown
    assert "* from your own file" in " ".join(shown.split())
    page = " ".join(maya("gpus", "my-h100", "--hardware", "own.toml", cwd=tmp_path, columns=160).stdout.split())
    assert "my-h100, derived from h100" in page
    assert "700 W, limited to 500 W your file (power_limit_w), h100-datasheet" in page


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN.replace("500", "-5"))
    done = maya("gpus", "--hardware", "own.toml", cwd=tmp_path, columns=120)
    assert done.returncode == 2
    assert done.stderr == "maya: own.toml: gpus.my-h100: power_limit_w must be greater than 0, not -5.\n"
    done = maya("gpus", "h100", "--nodes", cwd=tmp_path)
    assert "one list at a time" in done.stderr


SCRIPT = """
import os, torch
os.chdir("/")
properties = torch.cuda.get_device_properties(0)
print("sees", properties.name, properties.total_memory // 2**30, torch.cuda.device_count())
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("launcher", [["python"], ["torchrun", "--nproc-per-node", "2"]])
def test_a_program_runs_on_the_users_own_gpu(tmp_path: Path, launcher: list[str]) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = maya("run", "--hardware", "own.toml", "--gpu", "my-h100", "--", *launcher, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sees Mine 70" in done.stdout
    assert "70.0 GiB" in done.stdout
