"""`maya calibrate` as users type it."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from calibrate.kineto_traces import KinetoTrace
from calibrate.test_calibrate_nccl import RANKS, TWO_NODES
from typer.testing import CliRunner

from maya_core.cli import app
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.ops.kernel import Streaming
from maya_core.predictor.calibration import load_calibration, path_of, read_calibration, write_calibration
from maya_core.predictor.pricing import Predictor

SLOWER = 1.25


def maya(*words: object) -> str:
    done = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return " ".join(done.output.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAYA_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "profiles"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four steps on a GPU that takes a quarter longer than Maya predicts."""
    gpu, written = find_gpu("h100"), KinetoTrace()
    for _ in range(4):
        for rows in range(256, 8192, 256):
            nbytes = 4 * rows * 4096
            kernel = Streaming("elementwise", 2 * nbytes, nbytes, nbytes // 4, 0)
            written.add(rows, 4096, SLOWER * 1e6 * float(Predictor(gpu).kernels([kernel]).seconds[0]))
    return written.write(tmp_path / "trace.json.gz")


def test_from_a_trace_to_predictions(trace: Path, folder: Path) -> None:
    said = maya("kineto", trace)
    assert "124 kernels and copies, 93 used" in said
    assert "31 were the first of their shape" in said
    assert "Error on 6 held-out shapes: 20.0 % before, 0.0 % after" in said
    assert str(folder / "h100.json") in said

    found = load_calibration("h100")
    assert found is not None and [source.kind for source in found.sources] == ["kineto"]
    unseen = [Streaming("elementwise", 3e7, 1.5e7, 3.7e6, 0)]
    gpu = find_gpu("h100")
    before = Predictor(gpu).kernels(unseen).seconds
    after = Predictor(gpu, calibration=found).kernels(unseen).seconds
    assert after / before == pytest.approx(SLOWER, rel=0.01)


def test_collectives_are_added_to_it(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "all_reduce.txt"
    output.write_text(TWO_NODES.format(ranks=RANKS))
    maya("kineto", trace)
    with pytest.raises(MayaError, match="'h100' already"):
        maya("nccl", output)
    assert "all_reduce │ 2 x 8 │ infiniband-ndr │ 3: 1 MiB to 4 MiB" in maya("nccl", output, "--add")
    found = load_calibration("h100")
    assert found is not None and (len(found.measured), len(found.collectives)) == (31, 3)
    with pytest.raises(MayaError, match="--add and --replace do not work together"):
        maya("nccl", output, "--add", "--replace")


def _make_older(name: str) -> None:
    path = path_of(name)
    found = read_calibration(path)
    assert found is not None
    write_calibration(found.model_copy(update={"created": found.created - timedelta(days=1)}), replace=True)


def test_several_are_listed_shown_and_removed(trace: Path) -> None:
    assert "No calibrations" in maya("list")
    maya("kineto", trace, "--name", "first")
    _make_older("first")
    assert "These older calibrations are not used any more: first" in maya("kineto", trace, "--name", "second")
    listed = maya("list")
    assert listed.index("second") < listed.index("first") < listed.index("no, a newer one")
    assert "NVIDIA H100 80GB HBM3" in maya("show", "first")
    assert json.loads(CliRunner().invoke(app, ["calibrate", "show", "first", "--json"]).output)["gpu"] == "h100"
    maya("remove", "first")
    with pytest.raises(MayaError, match="no calibration 'first'"):
        maya("show", "first")


def test_a_trace_that_nothing_can_be_taken_from(tmp_path: Path, folder: Path) -> None:
    written = KinetoTrace()
    with written.op("aten::add", ("float", [4]), ("float", [4]), 1):
        pass
    written.kernel("triton_poi_fused_add_0", 4.0)
    with pytest.raises(MayaError, match=r"nothing in .* could be used"):
        maya("kineto", written.write(tmp_path / "compiled.json"))
    assert not folder.exists()


def test_another_gpu_is_not_taken_by_mistake(trace: Path, tmp_path: Path) -> None:
    maya("kineto", trace, "--name", "ours")
    written = KinetoTrace(gpu={"id": 0, "name": "NVIDIA H200"})
    written.add(64, 64, 3.0)
    with pytest.raises(MayaError, match="'ours' is a calibration of h100, but these measurements are of h200"):
        maya("kineto", written.write(tmp_path / "h200.json"), "--name", "ours", "--add")


def test_a_predicted_timeline_is_no_measurement(tmp_path: Path) -> None:
    from report.small_jobs import trained

    from maya_core.report.timeline_file import write_trace

    [predicted] = write_trace(trained(1)[0], tmp_path / "timeline.json.gz", rank=0)
    with pytest.raises(MayaError, match=r"timeline.json.gz is a timeline that Maya [\d.]+ predicted") as error:
        maya("kineto", predicted)
    assert "Give a trace of a real run" in error.value.advice
