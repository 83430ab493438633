"""NVML and nvidia-smi in programs under emulation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu

MIB = 2**20


@pytest.fixture
def node():
    emulated = EmulatedDevice(find_gpu("h100"), 4)
    yield emulated
    emulated.remove()


@pytest.fixture
def nvml(node):
    import pynvml

    pynvml.nvmlInit()
    yield pynvml
    pynvml.nvmlShutdown()


def smi(*arguments: str) -> str:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True).stdout


def test_devices_are_those_torch_sees(nvml):
    assert nvml.nvmlDeviceGetCount() == 4
    handle = nvml.nvmlDeviceGetHandleByIndex(2)
    assert nvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name(2) == "NVIDIA H100 80GB HBM3"
    assert nvml.nvmlDeviceGetUUID(handle) == f"GPU-{torch.cuda.get_device_properties(2).uuid}"
    assert nvml.nvmlDeviceGetCudaComputeCapability(handle) == (9, 0)
    assert nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(handle)) == handle
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    assert bus == "00000000:1B:00.0"
    assert nvml.nvmlDeviceGetHandleByPciBusId(bus.encode()) == handle


def test_memory_is_what_the_allocator_holds(nvml):
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    before = nvml.nvmlDeviceGetMemoryInfo(handle)
    held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:1")
    after = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    assert after.used - before.used == held.nbytes
    assert after.total == 85017493504 == after.used + after.free
    assert nvml.nvmlDeviceGetComputeRunningProcesses(handle)[0].usedGpuMemory == after.used
    assert torch.cuda.device_memory_used(1) == after.used


def test_torch_asks_our_nvml(node):
    assert torch.cuda.utilization() == 100
    assert torch.cuda.power_draw() == 700_000
    assert torch.cuda.clock_rate() == 1980
    assert 0 < torch.cuda.temperature() < 90
    assert f"process {os.getpid():>10d}" in torch.cuda.list_gpu_processes()


def test_visible_devices_are_not_counted_twice(node, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert torch.cuda.utilization(1) == 100


def test_gpus_reach_each_other_by_nvlink(nvml):
    one, other = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    assert nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
    assert nvml.nvmlDeviceGetTopologyCommonAncestor(one, other) == nvml.NVML_TOPOLOGY_NODE
    assert [nvml.nvmlDeviceGetNvLinkState(one, link) for link in range(18)] == [1] * 18
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetNvLinkState(one, 18)


def test_what_is_not_answered_is_not_supported(nvml):
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(nvml.NVMLError) as caught:
        nvml.nvmlDeviceGetFanSpeed(handle)
    assert type(caught.value) is nvml.NVMLError_NotSupported
    assert caught.value.value == nvml.NVML_ERROR_NOT_SUPPORTED == 3
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetHandleByIndex(4)
    with pytest.raises(AttributeError):
        nvml.no_such_name  # noqa: B018


def test_asking_before_init_is_an_error(node):
    import pynvml

    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_nvidia_smi_lists_gpus(node):
    lines = smi("-L").splitlines()
    assert len(lines) == 4
    assert lines[3] == "GPU 3: NVIDIA H100 80GB HBM3 (UUID: GPU-4d415941-0000-0000-0000-000000000004)"


def test_nvidia_smi_answers_queries_of_the_moment(node):
    query = "--query-gpu=index,name,memory.total,memory.used,utilization.gpu,compute_cap"
    held = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda:0")
    header, first, *others = smi(query, "--format=csv").splitlines()
    assert header == "index, name, memory.total [MiB], memory.used [MiB], utilization.gpu [%], compute_cap"
    used = 520 + held.nbytes // MIB
    assert first == f"0, NVIDIA H100 80GB HBM3, 81079 MiB, {used} MiB, 100 %, 9.0"
    assert len(others) == 3
    plain = smi("--query-gpu=memory.used,memory.free", "--format=csv,noheader,nounits", "-i", "0")
    assert plain == f"{used}, {81079 - used}\n"


def test_nvidia_smi_table_is_a_rectangle(node):
    lines = [line for line in smi().splitlines() if line.startswith(("|", "+"))]
    assert {len(line) for line in lines} == {91}
    assert "520MiB /  81079MiB" in "".join(lines)


def test_nvidia_smi_shows_the_topology(node):
    rows = [line.split("\t") for line in smi("topo", "-m").splitlines()]
    assert rows[0][1:5] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert rows[2][:5] == ["GPU1", "NV18", " X ", "NV18", "NV18"]


def test_nvidia_smi_refuses_unknown_fields(node):
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=colour", "--format=csv"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == 'Field "colour" is not a valid field to query.\n'


def test_everything_leaves_with_the_device():
    path, module = os.environ.get("PATH"), sys.modules.get("pynvml")
    emulated = EmulatedDevice(find_gpu("h100"), 1)
    script = shutil.which("nvidia-smi")
    assert script is not None
    emulated.remove()
    assert os.environ.get("PATH") == path
    assert sys.modules.get("pynvml") is module
    assert not os.path.exists(os.path.dirname(script))
