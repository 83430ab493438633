"""Trace files: they are small, reading gives what was written, and other files are rejected by name."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from launches import launches
from models import gpt2

import maya_core
from maya_core.trace import read_trace
from maya_core.trace.schema import EventKind


def train() -> None:
    model, loss = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(10):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[maya_core.emulate, Path]:
    folder = tmp_path_factory.mktemp("trace")
    with maya_core.emulate("h100", out=folder) as job:
        train()
    return job, job.folder / "rank-00000.trace"


def test_what_is_written_is_read(written: tuple[maya_core.emulate, Path]) -> None:
    job, path = written
    read = read_trace(path)
    assert np.array_equal(read.events, job.trace.events)
    assert read.calls == job.trace.calls
    assert read.modules == job.trace.modules
    assert read.streams == [(0, 0)]
    assert read.steps == 10
    first = read.calls[int(read.ops["subject"][-1])]
    assert first.op.startswith("aten::")


def test_steps_repeat_and_are_compact(written: tuple[maya_core.emulate, Path]) -> None:
    job, path = written
    trace = job.trace
    counts = {launches(trace, trace.step(n)) for n in range(3, 11)}
    assert len(counts) == 1
    assert path.stat().st_size / len(trace.ops) < 100
    with pytest.raises(IndexError, match="step 11"):
        trace.step(11)


def test_same_program_same_trace(written: tuple[maya_core.emulate, Path]) -> None:
    job, _ = written
    with maya_core.emulate("h100") as again:
        train()
    for name in job.trace.events.dtype.names:
        if name not in ("time_ns", "thread"):
            assert np.array_equal(job.trace.events[name], again.trace.events[name]), name


def test_nothing_private_is_stored(written: tuple[maya_core.emulate, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = written
    with zipfile.ZipFile(path) as archive:
        text = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".json")).decode()
        meta = json.loads(archive.read("meta.json"))
    assert str(Path.home()) not in text
    assert meta["version"] == 7
    assert "environ" not in text


@pytest.mark.parametrize("damage", ["truncated", "not a zip", "array cut short", "another kind"])
def test_damaged_traces_are_refused(written: tuple[maya_core.emulate, Path], tmp_path: Path, damage: str) -> None:
    _, path = written
    bad = tmp_path / "bad.trace"
    whole = path.read_bytes()
    if damage == "truncated":
        bad.write_bytes(whole[: len(whole) // 2])
    elif damage == "not a zip":
        bad.write_text("hello")
    else:
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(bad, "w") as target:
            for name in source.namelist():
                content = source.read(name)
                if damage == "array cut short" and name == "events/a.npy":
                    content = content[: len(content) // 2]
                if damage == "another kind" and name == "meta.json":
                    content = b'{"format": "photo album", "version": 1}'
                target.writestr(name, content)
    with pytest.raises(maya_core.MayaError, match=r"bad\.trace is not a whole Maya trace"):
        read_trace(bad)


def test_a_newer_trace_says_to_upgrade(written: tuple[maya_core.emulate, Path], tmp_path: Path) -> None:
    _, path = written
    newer = tmp_path / "newer.trace"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(newer, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "meta.json":
                content = json.dumps({**json.loads(content), "version": 99}).encode()
            target.writestr(name, content)
    with pytest.raises(maya_core.MayaError, match="newer Maya"):
        read_trace(newer)


def test_synchronisation_is_recorded() -> None:
    with maya_core.emulate("h100") as job:
        x = torch.ones(4).cuda()
        x.sum().item()
        torch.cuda.synchronize()
    kinds = job.trace.events["kind"].tolist()
    assert kinds.count(EventKind.STREAM_SYNC) == 2  # the blocking copy and .item()
    assert kinds.count(EventKind.DEVICE_SYNC) == 1
