"""Durations of a real run's trace: `maya run`, then `maya kernels` on its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.cluster import cluster
from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import Gemm
from maya_core.ops.plan import flops_of, kernels_of
from maya_core.predictor.calibration import Calibration, Measured
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.pricing import Predictor, durations_of
from maya_core.report.kernel_table import entries, shares
from maya_core.trace.job import JobTrace, read_job
from maya_core.trace.schema import EventKind

pytestmark = pytest.mark.slow

MAYA = [str(Path(sys.executable).with_name("maya"))]
SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)).cuda().bfloat16()
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("priced")
    (place / "train.py").write_text(SCRIPT)
    command = [*MAYA, "run", "--gpu", "a100", "--out", "out", "--", "torchrun", "--nproc-per-node", "8", "train.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return place / "out"


@pytest.fixture(scope="module")
def job(folder: Path) -> JobTrace:
    return read_job(folder)


def test_a_step_takes_what_its_products_must_take_and_a_collective_what_nvlink_allows(job: JobTrace):
    trace = job.ranks[0]
    priced = durations_of(trace, cluster("a100", 8, 1))
    found = entries(trace, priced)
    total = sum(entry.total for entry in found)
    step = trace.step(trace.steps)
    flops = sum(flops_of(trace.calls[number]) for number in step["subject"][step["kind"] == EventKind.OP])
    assert 0.3 < flops / total / 312e12 < 0.9
    gradients = [entry for entry in found if entry.name == "all_reduce"]
    nbytes = 2 * (1024 * 4096 * 2 + 3 * 4096 + 1024)
    assert 30e9 < 2 * 7 / 8 * nbytes / sum(entry.total for entry in gradients) < 300e9  # bus bandwidth
    assert max(gradients, key=lambda entry: entry.total).provenance is Provenance.INTERPOLATED
    known = shares(found)
    assert known[Provenance.MEASURED] == known[Provenance.BOUND] == 0
    assert known[Provenance.INTERPOLATED] > 0.5


def test_a_faster_gpu_is_faster_and_says_where_its_figures_come_from(job: JobTrace):
    trace = job.ranks[0]
    totals = {}
    for name in ("a100", "h100", "b200", "h100-nvl"):
        priced = durations_of(trace, cluster(name, 8, 1))
        totals[name] = sum(entry.total for entry in entries(trace, priced))
    assert totals["b200"] < totals["h100"] < totals["a100"]
    assert totals["h100"] < totals["h100-nvl"]
    assert "gemm/h100" in durations_of(trace, cluster("h100-nvl", 8, 1)).ops.profiles


def test_between_nodes_collectives_take_longer(job: JobTrace):
    trace = job.ranks[0]
    inside, across = (
        durations_of(trace, cluster("a100", each, nodes)).collectives.seconds.sum() for each, nodes in ((8, 1), (1, 8))
    )
    assert across > 2 * inside


def test_what_was_measured_comes_first(job: JobTrace):
    trace = job.ranks[0]
    number, kernel = next(
        (number, kernel) for number, call in enumerate(trace.calls)
        for kernel in kernels_of(call, Platform(find_gpu("a100"))) if kernel.family == "gemm"
    )  # fmt: skip
    calibration = Calibration(
        name="ours", gpu="a100", created="2026-01-01T00:00:00", shipped="", sources=[],
        measured=[Measured(family=kernel.family, model=kernel.model, sizes=list(kernel.sizes), seconds=0.123, samples=5)],
    )  # fmt: skip
    priced = durations_of(trace, machine := cluster("a100", 8, 1), Predictor(machine.gpu, calibration=calibration))
    assert priced.ops.seconds[number] >= 0.123
    assert priced.ops.provenance[number] == Provenance.MEASURED
    assert priced.ops.profiles[priced.ops.profile[number]] == "calibration/ours"


def test_the_command_lists_ops_and_how_they_are_known(folder: Path):
    shown = subprocess.run([*MAYA, "kernels", str(folder)], capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "160"})  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    for expected in ("addmm", "8192x1024", "all_reduce", "interpolated, gemm/a100", "How well times are known: "):
        assert expected in shown.stdout
    other = subprocess.run([*MAYA, "kernels", str(folder), "--gpu", "b200", "--top", "12"], capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "160"})  # fmt: skip
    assert "gemm/b200" in other.stdout
    missing = subprocess.run([*MAYA, "kernels", str(folder), "--rank", "5"], capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert missing.returncode == 2
    assert "rank 5 was not emulated" in missing.stderr


def test_an_op_is_the_sum_of_its_kernels(job: JobTrace):
    trace, predictor = job.ranks[0], Predictor(cluster("a100", 8, 1).gpu)
    ops = predictor.ops(trace.calls)
    planned = [kernels_of(call, predictor.platform) for call in trace.calls]
    for number, kernels in enumerate(planned):
        assert ops.seconds[number] == pytest.approx(predictor.kernels(kernels).seconds.sum())
    assert (ops.seconds[[not kernels for kernels in planned]] == 0).all()


def test_answers_are_joined_in_order():
    one = Durations.of(np.array([1.0]), Provenance.BOUND, "a")
    two = Durations.of(np.array([2.0, 3.0]), Provenance.MEASURED, "b")
    both = Durations.joined([one, two, one])
    assert list(both.seconds) == [1, 2, 3, 1]
    assert [both.profiles[i] for i in both.profile] == ["a", "b", "b", "a"]
    assert len(Durations.joined([])) == 0


def test_one_and_many_products_of_a_batch_keep_their_places():
    kernels = [Gemm("float32", batch, 256, 256, 256, 0) for batch in (8, 1, 8, 1, 16)]
    predictor = Predictor(cluster("v100", 1, 1).gpu)
    together = predictor.kernels(kernels)
    for place, kernel in enumerate(kernels):
        assert together.seconds[place] == pytest.approx(predictor.kernels([kernel]).seconds[0])
