"""DeepSpeed programs on emulated GPUs, as they are launched."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed_programs import BF16, PIPELINE, TRAIN, figures, launched, run, write
from torch import nn

import maya_core
from maya_core.pipeline import analyse
from maya_core.report.framework_log import framework_log
from maya_core.report.summary import summarize
from maya_core.trace.memory_peaks import CATEGORIES, blocks
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind, Phase

BUCKET = 500_000_000  # elements: DeepSpeed's default


def test_one_job_in_two_ways(tmp_path: Path) -> None:
    """`deepspeed --emulate` and torchrun predict the same, to the last byte; its log has predicted times, and nothing is written but
    the prediction."""
    noisy = {
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
    }
    write(tmp_path, {**BF16, **noisy}, train=TRAIN)
    private = tmp_path / "private"
    private.mkdir()
    train = ("train.py", "--deepspeed_config", "ds.json", "--save", "saved", "--emulate")
    flags = ("--emulate", "--emulate-out=here", "--num_gpus", "8")
    done = run("deepspeed", *flags, *train, cwd=tmp_path, TMPDIR=str(private))
    assert done.returncode == 0, done.stderr
    launched = json.loads((tmp_path / "here" / "latest" / "prediction.json").read_text())
    assert launched["world"]["size"] == 8
    assert launched["throughput"]["tokens_per_step"] == 8 * 2 * 64
    assert "told 0 0 8 8 0 1 127.0.0.1 29500 0 True" in done.stdout  # the last is the script's own --emulate
    for line in (" writes no checkpoints", "'s monitors write nothing"):
        assert done.stderr.count(f"maya: under emulation DeepSpeed{line}") == 1
    made = {path.name for path in tmp_path.iterdir()} - {"__pycache__", "home", "without", "private"}
    assert made == {"train.py", "ds.json", "here"}
    assert not list(private.glob("maya-*"))
    assert not (tmp_path / "home" / ".cache" / "torch_extensions").exists()

    step_ms = launched["step_time_s"] * 1e3
    fwd, bwd, step = (
        float(one) for one in re.findall(r"time \(ms\) \| fwd: (\S+) \| bwd: (\S+).* step: (\S+)", done.stdout)[0]
    )
    assert min(fwd, bwd, step) > 0
    assert fwd + bwd + step == pytest.approx(step_ms, rel=0.1)  # the rest is the program's own
    assert f"CurrSamplesPerSec={16e3 / step_ms:.4f}, MemAllocated=" in done.stdout
    iteration = re.search(r"\niter latency: +(\S+) ms", done.stdout)
    assert iteration and float(iteration[1]) == pytest.approx(fwd + bwd + step, abs=0.02)
    assert re.search(r"\nFLOPS per GPU = 3 \* fwd flops per GPU / iter latency: +\d\S* [GT]FLOPS", done.stdout)
    assert "nan" not in done.stdout

    command = ("maya", "run", "--json", "torchrun.json", "--", "torchrun", "--nproc-per-node", "8", *train)
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert figures(json.loads((tmp_path / "torchrun.json").read_text())) == figures(launched)


def test_hosts_and_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline over the hosts of a hostfile, which are not there: a rank of each stage runs."""
    write(tmp_path, pipe=PIPELINE)
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("node-a slots=8\nnode-b slots=8\nnode-c slots=8\n")
    job = launched("--hostfile", "hosts", "--exclude", "node-b", "--no_local_rank", "pipe.py", out=tmp_path / "out")
    assert job is not None
    assert (job.nodes, job.gpus_per_node, list(job.ranks)) == (2, 8, [0, 8])
    analysis = analyse(job)
    prediction = summarize(analysis)
    assert prediction.step_time_s is not None
    assert any(row.op == "send" for row in prediction.communication)
    lines = framework_log(analysis)
    step_s = prediction.step_time_s
    told = f"iter time (s): {step_s:0.3f} samples/sec: {4 * 4 * 8 / step_s:0.3f}"
    assert [line for line in lines if line.startswith("steps: 2 loss: ") and line.endswith(told)]


def test_memory_is_the_arithmetic_of_zero() -> None:
    """2 bytes a parameter, 2 a gradient, 12 of state, each divided by the ranks from its stage on; and DeepSpeed is as it was after."""
    import deepspeed
    from deepspeed import comm

    ranks, width, layers = 64, 1024, 48
    found = deepspeed.accelerator.get_accelerator()._name
    with maya_core.emulate("h100", gpus_per_node=8, nodes=8) as job:
        deepspeed.init_distributed()
        for stage in (1, 2, 3):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()
            config = {**BF16, "zero_optimization": {"stage": stage}}
            engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            for _ in range(2):
                engine.backward(engine(torch.zeros(2, width, dtype=torch.bfloat16, device=engine.device)).sum())
                engine.step()
            engine.destroy()
            del engine, model
            # Autograd's own thread may still hold the end of the last backward, and so the optimizer: it lets go before another one.
            torch.zeros(1, device="cuda", requires_grad=True).sum().backward()
            gc.collect()
    assert deepspeed.accelerator.get_accelerator()._name == found
    assert not comm.is_initialized()

    size = layers * width * width
    _, one, _, two, _, three = np.flatnonzero(job.trace.events["kind"] == EventKind.STEP_END)
    shares = {1: (1, 1), 2: (1, None), 3: (ranks, ranks)}
    for (stage, (parameters, gradients)), end in zip(shares.items(), (one, two, three), strict=True):
        held = _after_backward(job.trace, end)
        assert held["optimizer_state"] == pytest.approx(12 * size / ranks, rel=0.01), stage
        assert held["parameters"] == pytest.approx(2 * size / parameters, rel=0.02), stage
        assert held["buffers"] >= 2 * BUCKET, stage
        if gradients is not None:  # in stage 2 they are all in the bucket until backward is over
            assert held["gradients"] == pytest.approx(2 * size / gradients, rel=0.02), stage


def _after_backward(trace: RankTrace, step_end: int) -> dict[str, float]:
    """Bytes by category at the end of the step's backward."""
    at = np.flatnonzero(trace.events["phase"][:step_end] == Phase.BACKWARD)[-1]
    every = blocks(trace, 0)
    live = (every.made <= at) & (every.freed > at)
    return dict(zip(CATEGORIES, np.bincount(every.category[live], every.bytes[live], len(CATEGORIES)), strict=True))
