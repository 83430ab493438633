"""The caching allocator from the program's view: sizes, pools, statistics, snapshots, and running out of memory."""

from __future__ import annotations

import pickle

import pytest
import torch

import maya_core
from maya_core.device.emulated import EmulatedDevice

MIB = 2**20


def test_sizes_are_rounded_and_pooled(device: EmulatedDevice) -> None:
    small = torch.empty(1, device="cuda")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (512, 2 * MIB)
    large = torch.empty(MIB + 1, dtype=torch.uint8, device="cuda")  # past 1 MiB: from a segment of 20 MiB
    assert torch.cuda.memory_reserved() == 22 * MIB
    # More than is left of that segment, so it gets its own, in steps of 2 MiB.
    huge = torch.empty(21 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 44 * MIB
    del small, large, huge
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_statistics_count_blocks_and_bytes(device: EmulatedDevice) -> None:
    blocks = [torch.empty(n * 1000, device="cuda") for n in range(1, 50)]
    del blocks[::2]
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.current"] == 24
    assert stats["allocation.all.allocated"] == 49
    rounded = [-(-4000 * n // 512) * 512 for n in range(1, 50)]
    assert stats["allocated_bytes.all.current"] == sum(rounded[1::2])
    assert stats["allocated_bytes.all.peak"] == sum(rounded)
    assert stats["requested_bytes.all.current"] == sum(4000 * n for n in range(2, 50, 2))
    free, total = torch.cuda.mem_get_info()
    assert total == 85017493504
    assert free == total - 545259520 - torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == sum(rounded[1::2])
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()


def test_out_of_memory_has_pytorchs_wording_and_can_be_survived(device: EmulatedDevice) -> None:
    held = torch.empty(70 * 2**30, dtype=torch.uint8, device="cuda")
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 8.67 GiB is free",
    ):
        torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")
    del held
    # The allocator frees its cache first.
    assert torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda").numel() == 20 * 2**30
    assert torch.cuda.memory_stats()["num_ooms"] == 1


def test_memory_of_another_stream_is_not_reused_until_it_is_safe(device: EmulatedDevice) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        on_side = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    address = on_side.data_ptr()
    del on_side
    assert torch.empty(4 * MIB, dtype=torch.uint8, device="cuda").data_ptr() != address
    with torch.cuda.stream(side):
        assert torch.empty(4 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address


def test_each_device_has_memory_of_its_own() -> None:
    with maya_core.emulate("h100", gpus_per_node=2):
        x = torch.empty(MIB, device="cuda:1")
        assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (0, 4 * MIB)
        assert (x + 1).device == torch.device("cuda:1")


def test_memory_fraction(device: EmulatedDevice) -> None:
    torch.cuda.set_per_process_memory_fraction(0.1)
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        torch.empty(9 * 2**30, dtype=torch.uint8, device="cuda")


def test_expandable_segments_grow_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with maya_core.emulate("h100"):
        blocks = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        segments = torch.cuda.memory_snapshot()
        assert len(segments) == 1
        assert segments[0]["is_expandable"]
        assert segments[0]["total_size"] == 120 * MIB
        del blocks


def test_a_wrong_allocator_configuration_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_sise_mb:20")
    with pytest.raises(maya_core.MayaError, match="max_split_sise_mb"), maya_core.emulate("h100"):
        pass
    assert not torch.cuda.is_available()


def test_memory_pools_and_use_mem_pool(device: EmulatedDevice) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert [segment["segment_pool_id"] for segment in pool.snapshot()] == [pool.id]
    del x


def test_snapshot_opens_in_memory_viz(device: EmulatedDevice, tmp_path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    keep = torch.empty(3 * MIB, device="cuda")
    torch.empty(5 * MIB, device="cuda")
    torch.cuda.memory._dump_snapshot(tmp_path / "snapshot.pickle")
    torch.cuda.memory._record_memory_history(None)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed"]
    frames = {frame["name"] for event in snapshot["device_traces"][0] for frame in event["frames"]}
    assert "test_snapshot_opens_in_memory_viz" in frames
    from torch.cuda import _memory_viz

    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)
    assert "32.0MiB" in _memory_viz.segsum(snapshot)  # one segment of 12 MiB, one of 20
    assert keep.numel() == 3 * MIB


def test_cublas_workspaces_are_per_thread_and_stream(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # since torch 2.15 they are not kept by default
    a = torch.empty(64, 64, device="cuda", requires_grad=True)
    base = torch.cuda.memory_allocated()
    out = a @ a
    after_forward = torch.cuda.memory_allocated()
    assert after_forward - base == 32 * MIB + 64 * 64 * 4
    out.sum().backward()  # the autograd thread has a handle of its own
    assert torch.cuda.memory_allocated() - after_forward >= 32 * MIB
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() < MIB


def test_running_out_and_going_on_is_a_fit_with_a_word_of_warning() -> None:
    with maya_core.emulate("h100") as job:
        batch = 64
        while True:  # as batch size finders do
            try:
                torch.empty(batch, 2**30, dtype=torch.uint8, device="cuda").add_(1).mul(2)
                break
            except torch.OutOfMemoryError:
                batch //= 2
    assert batch == 32
    assert job.prediction.memory.ranks[0].fits
    assert any("ran out of memory 1 time" in caveat for caveat in job.prediction.caveats)
    assert any("released its cache" in caveat for caveat in job.prediction.caveats)
