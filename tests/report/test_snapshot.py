"""Memory snapshots as PyTorch's own viewer reads them."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from report.small_jobs import out_of_memory, trained
from torch.cuda import _memory_viz

import maya_core
from maya_core.errors import MayaError
from maya_core.report.snapshot import write_snapshot
from maya_core.trace.memory_peaks import CATEGORIES

# All that the viewer's JavaScript (torch/utils/viz/MemoryViz.js) knows of pickle.
KNOWN = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE",
    "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS",
}  # fmt: skip


def peak(entries: list[dict[str, Any]], more: str, less: str) -> int:
    now = most = 0
    for entry in entries:
        now += {more: 1, less: -1}.get(entry["action"], 0) * entry["size"]
        most = max(most, now)
    return most


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    analysis, _ = trained()
    return write_snapshot(analysis.job.ranks[0], tmp_path / "memory.pickle")


def test_peaks_are_the_predictions(saved: Path) -> None:
    _, prediction = trained()
    [entries] = pickle.loads(saved.read_bytes())["device_traces"]
    memory = prediction.memory.ranks[0]
    assert peak(entries, "alloc", "free_completed") == memory.peak_allocated_bytes
    assert peak(entries, "segment_alloc", "segment_free") == memory.peak_reserved_bytes


def test_blocks_say_where_they_come_from(saved: Path) -> None:
    [entries] = pickle.loads(saved.read_bytes())["device_traces"]
    allocations = [entry for entry in entries if entry["action"] == "alloc"]
    [frame] = max(allocations, key=lambda entry: entry["size"])["frames"]
    assert frame["filename"].endswith("small_jobs.py") and frame["line"] > 0
    assert {entry["category"] for entry in allocations} <= set(CATEGORIES)
    assert {"parameters", "gradients", "optimizer_state", "activations"} <= {entry["category"] for entry in allocations}


def test_pytorchs_tools_read_it(saved: Path, tmp_path: Path) -> None:
    data = pickle.loads(saved.read_bytes())
    assert "total_allocated" in _memory_viz.segsum(data)  # which checks that blocks fill their segments
    assert "cudaMalloc" in _memory_viz.trace(data)
    assert "small_jobs.py" in _memory_viz.memory(data, format_flamegraph=str)
    assert "small_jobs.py" in _memory_viz.segments(data, format_flamegraph=str)
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(saved), "-o", str(page)]
    subprocess.run(command, check=True, timeout=60)
    assert "snapshot.pickle" in page.read_text()


def test_the_viewer_knows_its_pickle(saved: Path) -> None:
    raw = saved.read_bytes()
    assert {code.name for code, _, _ in pickletools.genops(raw)} <= KNOWN
    assert raw[:2] == b"\x80\x04"
    categories = {entry.get("category") for entry in pickle.loads(raw)["device_traces"][0]}
    assert "unknown" in categories  # without it the viewer stops at a misspelt name of its own


def test_running_out_of_memory_is_in_it(tmp_path: Path) -> None:
    analysis, prediction = out_of_memory()
    saved = write_snapshot(analysis.job.ranks[0], tmp_path / "memory.pickle")
    [entries] = pickle.loads(saved.read_bytes())["device_traces"]
    [oom] = [entry for entry in entries if entry["action"] == "oom"]
    assert oom["size"] == prediction.memory.ranks[0].out_of_memory_bytes
    assert 0 < oom["device_free"] < oom["size"]


def test_the_gpu_a_rank_uses_need_not_be_the_first(tmp_path: Path) -> None:
    with maya_core.emulate("h100", gpus_per_node=2) as job:
        torch.ones(2**20, device="cuda:1")
    data = pickle.loads(write_snapshot(job.trace, tmp_path / "memory.pickle").read_bytes())
    assert [len(entries) > 0 for entries in data["device_traces"]] == [False, True]
    assert {segment["device"] for segment in data["segments"]} == {1}


def test_a_gpu_without_allocations(tmp_path: Path) -> None:
    analysis, _ = trained()
    with pytest.raises(MayaError, match="allocates nothing on GPU 3") as error:
        write_snapshot(analysis.job.ranks[0], tmp_path / "memory.pickle", device=3)
    assert "0" in error.value.advice
