"""Predicted runs as profiler traces: HolisticTraceAnalysis and our own reader understand them, and every trace is consistent."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launches import launches
from report.small_jobs import STEPS, hung, trained

from maya_core.calibrate import profiler_trace as reader
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.predictor.pricing import Predictor
from maya_core.report.timeline_file import write_trace
from maya_core.simulator.host import KERNEL_GAP_S

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
STEADY = STEPS - 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two data-parallel ranks."""
    return write_trace(trained(2)[0], tmp_path_factory.mktemp("traces") / "trace.json.gz")


def load(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def of(trace: dict[str, Any], *categories: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") in categories and event["ph"] == "X"]


def union(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -np.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def test_a_file_for_each_rank(files: list[Path], tmp_path: Path) -> None:
    assert [path.name for path in files] == ["trace-rank-00000.json.gz", "trace-rank-00001.json.gz"]
    for rank, path in enumerate(files):
        trace = load(path)
        assert trace["schemaVersion"] == 1
        assert trace["deviceProperties"][0]["name"] == "NVIDIA H100 80GB HBM3"
        assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (rank, 2)
    [one] = write_trace(trained(2)[0], tmp_path / "one.json", rank=1)
    assert one.name == "one.json" and load(one) == load(files[1])
    assert write_trace(trained(2)[0], tmp_path / "trace.json.gz")[0].read_bytes() == files[0].read_bytes()


def test_steps_kernels_and_copies_are_the_predictions(files: list[Path]) -> None:
    analysis, prediction = trained(2)
    trace = load(files[0])
    assert [event["name"] for event in of(trace, "user_annotation")] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert [event["name"] for event in of(trace, "gpu_user_annotation")] == ["ProfilerStep#2", "ProfilerStep#3"]
    compute = [event for event in of(trace, *ON_GPU) if not event["name"].startswith("nccl")]
    where, _ = analysis.steady_events(0)
    assert len(compute) == launches(analysis.job.ranks[0], analysis.job.ranks[0].events[where])
    rank = prediction.ranks[0]
    alone = sum(seconds for family, seconds in rank.by_family_s.items() if family != "communication")
    busy = sum(event["dur"] for event in compute) * 1e-6 / STEADY
    assert busy == pytest.approx(alone + rank.slowed_s, rel=0.01)
    # Between kernels there are gaps, which the prediction counts as compute.
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in compute]
    covered = union(spans) * 1e-6 / STEADY + KERNEL_GAP_S * len(compute) / STEADY
    assert covered == pytest.approx(rank.compute_s + rank.copy_s, rel=0.01)


def test_streams_are_queues_and_launches_come_first(files: list[Path]) -> None:
    trace = load(files[0])
    launches = {event["args"]["correlation"]: event for event in of(trace, "cuda_runtime")}
    streams = defaultdict(list)
    for event in of(trace, *ON_GPU):
        streams[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        launch = launches[event["args"]["correlation"]]
        assert launch["ts"] + launch["dur"] <= event["ts"] + 1e-3
        assert event["args"]["stream"] == event["tid"] and event["args"]["device"] == event["pid"]
    assert len(streams) == 2  # the default stream, and NCCL's
    for spans in streams.values():
        spans.sort()
        assert all(end <= start + 2e-3 for (_, end), (start, _) in pairwise(spans))
    arrows = [event for event in trace["traceEvents"] if event.get("cat") == "ac2g"]
    assert {event["id"] for event in arrows if event["ph"] == "s"} == {e["id"] for e in arrows if e["ph"] == "f"}


def test_ops_and_collectives_say_what_they_are_of(files: list[Path]) -> None:
    trace = load(files[0])
    product = next(event for event in of(trace, "cpu_op") if event["name"] == "aten::addmm")
    assert product["args"]["Input type"][:3] == ["float", "float", "float"]
    assert product["args"]["Input Dims"][1] == [4096, 512] and product["args"]["Input Strides"][2] == [1, 512]
    talk = [event for event in of(trace, "kernel") if event["name"].startswith("ncclDevKernel_AllReduce_Sum_f32_")]
    assert talk and all(event["args"]["Collective name"] == "allreduce" for event in talk)
    assert talk[0]["args"]["Process Group Ranks"] == "[0, 1]" and talk[0]["args"]["Group size"] == 2
    given = sum(event["args"]["In msg nelems"] for event in talk) * 4 / STEADY
    [told] = [row for row in trained(2)[1].communication if row.op == "all_reduce"]
    assert given == told.bytes


def test_our_own_reader_measures_what_was_predicted(files: list[Path]) -> None:
    gpu = find_gpu("h100")
    found = reader.read_trace(files[0], gpu, gpus_per_node=8)
    compute = [event for event in of(load(files[0]), *ON_GPU) if not event["name"].startswith("nccl")]
    assert found.counts.kernels == len(compute)
    counts = found.counts
    assert counts.used + counts.contended + counts.warm_up > 0.8 * counts.kernels
    assert not counts.unpaired and not counts.without_op
    predicted = Predictor(gpu).kernels([row.kernel for row in found.measured]).seconds
    ratio = np.array([row.seconds for row in found.measured]) / predicted
    assert np.allclose(ratio, 1.0, rtol=0.01)
    parameters = 4 * (512 * 2048 + 2048 + 2048 * 512 + 512) * 4
    buckets = {row.bytes for row in found.collectives if row.op == "all_reduce" and row.bytes > 2**20}
    assert sum(buckets) == parameters


def test_holistic_trace_analysis_agrees(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    how = "pip install plotly pandas psutil, and --no-deps HolisticTraceAnalysis (which else brings JupyterLab)"
    hta = pytest.importorskip("hta.trace_analysis", reason=how, exc_type=ImportError)
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    _, prediction = trained(2)
    analyzer = hta.TraceAnalysis(trace_dir=str(files[0].parent), include_last_profiler_step=True)
    assert analyzer.t.get_ranks() == [0, 1]
    split = analyzer.get_temporal_breakdown(visualize=False)
    on_gpu = of(load(files[0]), *ON_GPU)
    launches = len(on_gpu) / STEADY
    for rank in prediction.ranks:
        row = split[split["rank"] == rank.rank].iloc[0]
        assert row["kernel_time(us)"] * 1e-6 == pytest.approx(STEADY * rank.step_time_s, rel=0.01)
        compute = row["compute_time(us)"] * 1e-6 / STEADY
        assert compute == pytest.approx(rank.compute_s - KERNEL_GAP_S * launches, rel=0.02)
    overlap = analyzer.get_comm_comp_overlap(visualize=False)
    talk = [(e["ts"], e["ts"] + e["dur"]) for e in on_gpu if e["name"].startswith("nccl")]
    compute = [(e["ts"], e["ts"] + e["dur"]) for e in on_gpu if e["cat"] == "kernel" and "nccl" not in e["name"]]
    hidden = (union(talk) + union(compute) - union(talk + compute)) / union(talk)
    assert hidden > 0.1
    assert overlap["comp_comm_overlap_pctg"].iloc[0] == pytest.approx(100 * hidden, abs=0.1)
    kinds, kernels = analyzer.get_gpu_kernel_breakdown(visualize=False)
    assert {"COMPUTATION", "COMMUNICATION"} <= set(kinds["kernel_type"])
    assert kernels["name"].str.startswith("gemm<float> aten::").any()


def test_a_job_that_hangs_has_none(tmp_path: Path) -> None:
    with pytest.raises(MayaError, match="no step to write"):
        write_trace(hung()[0], tmp_path / "trace.json")
