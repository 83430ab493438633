"""Traces that older versions of Maya wrote are still read, and predicted as if they were recorded today.

`data/version-N` is the output of that version's `maya run --gpu a100 --steps 3 -- python prog.py` for this program, without the names of folders:

    model = Sequential(Linear(1024, 4096), GELU(), LayerNorm(4096), Linear(4096, 512)).cuda()
    optimizer = AdamW(model.parameters())
    x = torch.randn(2048, 1024, device="cuda")
    y = torch.randint(512, (2048,), device="cuda")
    for _ in range(3):
        cross_entropy(model(x), y).backward(), optimizer.step(), optimizer.zero_grad()

There is no version 4: no revision of Maya wrote it, and its content came with version 5.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maya_core.hardware.cluster import cluster
from maya_core.pipeline import predict
from maya_core.predictor.pricing import durations_of
from maya_core.trace.job import read_job, trace_path
from maya_core.trace.rank import RankTrace, read_trace, write_trace
from maya_core.trace.schema import VERSION, EventKind

DATA = Path(__file__).parent / "data"
VERSIONS = (1, 2, 3, 5)
JOBS = VERSIONS[1:]  # version 1 wrote a trace, but no job.json
STEPS = 3
# The same program on an A100, recorded in version 6.
STEP_SECONDS = 4.574e-3
KERNEL_SECONDS = 4.546e-3  # of the last step
PEAK_BYTES = 256_304_640
NEAR = 0.2


def path_of(version: int) -> Path:
    return trace_path(DATA / f"version-{version}", 0)


def member(version: int, name: str) -> Any:
    """A part of the file, read without Maya's reader."""
    with zipfile.ZipFile(path_of(version)) as archive:
        return json.loads(archive.read(name))


def column(version: int, name: str) -> np.ndarray:
    with zipfile.ZipFile(path_of(version)) as archive, archive.open(f"events/{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def ops_of(names: list[str], kinds: np.ndarray, subjects: np.ndarray) -> Counter[str]:
    """How often each op is called."""
    return Counter(names[number] for number in subjects[kinds == EventKind.OP].tolist())


def sizes_in(value: Any) -> list[list[int]]:
    """The sizes of the tensors in a row of the file, at any depth of lists."""
    if isinstance(value, dict):
        return [value["s"]]
    return [sizes for item in value for sizes in sizes_in(item)] if isinstance(value, list) else []


def kernel_seconds(trace: RankTrace) -> float:
    """The duration of the kernels of the last step, on the GPU of the recording."""
    step = trace.step(trace.steps)
    calls = step["subject"][step["kind"] == EventKind.OP]
    return float(durations_of(trace, cluster(trace.meta["gpu"], 1)).ops.seconds[calls].sum())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_file_is_of_its_version(version: int) -> None:
    assert member(version, "meta.json")["version"] == version
    assert read_trace(path_of(version)).meta["version"] == version


@pytest.mark.parametrize("version", VERSIONS)
def test_steps_are_those_recorded(version: int) -> None:
    trace = read_trace(path_of(version))
    assert trace.steps == trace.meta["steps"] == STEPS
    assert [int(trace.step(number)["a"][-1]) for number in range(1, STEPS + 1)] == [1, 2, 3]


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_are_those_of_the_file(version: int) -> None:
    trace, rows = read_trace(path_of(version)), member(version, "signatures.json")
    names = [row["op"] for row in rows]
    assert [call.op for call in trace.calls] == names
    assert [call.names for call in trace.calls] == [row["names"] for row in rows]
    assert [[list(tensor.sizes) for tensor in call.results] for call in trace.calls] == [
        sizes_in(row["out"]) for row in rows
    ]
    called = ops_of(names, trace.events["kind"], trace.events["subject"])
    assert called == ops_of(names, column(version, "kind"), column(version, "subject"))
    assert called["aten::addmm"] == 2 * STEPS


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_version_did_not_have_is_empty(version: int) -> None:
    trace = read_trace(path_of(version))
    assert (trace.communicators, trace.collectives, trace.sites) == ([], [], [])
    made = trace.events["subject"][trace.events["kind"] == EventKind.ALLOC]
    lines = {trace.lines[number] for number in made.tolist()}
    assert lines == set(member(version, "lines.json")[1:] if version >= 3 else [""])


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_take_as_long_as_of_a_trace_of_today(version: int) -> None:
    assert kernel_seconds(read_trace(path_of(version))) == pytest.approx(KERNEL_SECONDS, rel=NEAR)


@pytest.mark.parametrize("version", JOBS)
def test_the_job_is_predicted_as_one_of_today(version: int) -> None:
    job = read_job(DATA / f"version-{version}")
    prediction = predict(job)
    assert prediction.step_time_s == pytest.approx(STEP_SECONDS, rel=NEAR)
    assert prediction.memory.ranks[0].peak_allocated_bytes == PEAK_BYTES


@pytest.mark.parametrize("version", VERSIONS)
def test_written_again_it_is_of_today(version: int, tmp_path: Path) -> None:
    old, path = read_trace(path_of(version)), tmp_path / "again.trace"
    write_trace(path, old)
    new = read_trace(path)
    assert new.meta == {**old.meta, "version": VERSION}
    assert new.calls == old.calls
    assert np.array_equal(new.events, old.events)
    assert (new.modules, new.streams, new.lines) == (old.modules, old.streams, old.lines)
    assert kernel_seconds(new) == kernel_seconds(old)


def test_attention_stays_the_kernel_that_ran(tmp_path: Path) -> None:
    """Recorded on an A100 with only the memory-efficient backend switched on, which a trace of version 5 does not say."""
    old = read_trace(DATA / "version-5-attention" / "rank-00000.trace")
    write_trace(tmp_path / "again.trace", old)
    again = read_trace(tmp_path / "again.trace")
    for gpu in ("a100", "h100"):
        backends = {
            kernel.model
            for kernels in durations_of(again, cluster(gpu, 1)).kernels
            for kernel in kernels
            if kernel.family == "attention"
        }
        assert backends == {"efficient_forward", "efficient_backward"}
    assert kernel_seconds(again) == kernel_seconds(old)
