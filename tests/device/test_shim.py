"""The emulated GPU in Python: torch.cuda, torch.accelerator, streams, events, graphs and generators. All of it is removed again."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo  # comes with the first optimizer step and replaces functions of torch
from torch.utils._python_dispatch import TorchDispatchMode

import maya_core
from maya_core.device.emulated import EmulatedDevice
from maya_core.torch_seam.cuda import libraries
from maya_core.trace.schema import EventKind


def test_everything_is_as_before_once_the_block_ends() -> None:
    watched = [torch, torch._C, torch.cuda, torch.cuda.streams, torch.cuda.graphs, torch.cuda.memory, torch.cuda.nvtx, torch.version, torch.backends.cuda,
               torch.backends.cudnn, torch.nn.Module, torch.UntypedStorage]  # fmt: skip
    before = [dict(vars(module)) for module in watched]
    with maya_core.emulate("h100", gpus_per_node=2):
        assert torch.cuda.is_available()
        torch.nn.Linear(4, 4).cuda()(torch.randn(2, 4, device="cuda")).sum().backward()
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    assert not torch.accelerator.is_available()
    for module, was in zip(watched, before, strict=True):
        now = dict(vars(module))
        changed = {name for name in was.keys() | now.keys() if was.get(name) is not now.get(name)}
        assert not changed, (module, changed)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(1, device="cuda")


def test_the_process_trains_on_the_cpu_before_during_and_after() -> None:
    def train_on_cpu() -> float:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(32, 8), torch.randn(32, 1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    before = train_on_cpu()
    with maya_core.emulate("a100", gpus_per_node=4):
        during = train_on_cpu()
        # Needs engine threads that are started after the first backward.
        torch.randn(4, requires_grad=True, device="cuda:3").sum().backward()
    assert before == during == train_on_cpu()


def test_initialization_is_not_seen_by_the_modes_of_the_program() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(op))
            torch.cuda.memory_allocated()  # which would wait for an initialization that calls it
            return op(*args, **(kwargs or {}))

    ops: list[str] = []
    with maya_core.emulate("h100"), Seen():
        torch.empty(8, device="cuda").add_(1)
    assert ops == ["aten.empty.memory_format", "aten.add_.Tensor"]


def test_device_properties_are_the_catalogs() -> None:
    with maya_core.emulate("a100", gpus_per_node=4):
        assert torch.cuda.device_count() == 4
        assert torch.cuda.get_device_name(3) == "NVIDIA A100-SXM4-80GB"
        assert torch.cuda.get_device_capability() == (8, 0)
        properties = torch.cuda.get_device_properties("cuda:1")
        assert (properties.multi_processor_count, properties.total_memory) == (108, 85017493504)
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.get_arch_list()
        assert torch.version.cuda == libraries().cuda
        assert torch.cuda.nccl.version() == libraries().nccl
        assert torch.backends.cudnn.is_available()
        assert torch.cuda.can_device_access_peer(0, 1)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(4)


def test_torch_device_of_an_int_and_the_accelerator(device: EmulatedDevice) -> None:
    assert torch.device(0) == torch.device("cuda", 0)
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 1
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == 0


def test_type_strings_and_legacy_constructors(device: EmulatedDevice) -> None:
    x = torch.zeros(3, device="cuda")
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type("torch.cuda.LongTensor").dtype == torch.int64
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x.long(), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.cuda.HalfTensor(2, 3).shape == (2, 3)


def test_streams_come_from_pools_of_32_and_events_have_versions() -> None:
    with maya_core.emulate("h100") as job:
        streams = [torch.cuda.Stream() for _ in range(33)]
        assert streams[32] == streams[0]
        assert len({s.stream_id for s in streams}) == 32
        assert torch.cuda.Stream(priority=-1).priority == -1
        assert torch.cuda.default_stream().cuda_stream == 0
        side, event = streams[0], torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            x = torch.ones(1000, device="cuda") * 2
            event.record()
        event.record(side)
        torch.cuda.current_stream().wait_event(event)
        x.record_stream(torch.cuda.current_stream())
        event.synchronize()
        assert event.query()
        assert side.query()
    events = job.trace.events
    records = events[events["kind"] == EventKind.EVENT_RECORD]
    assert records["a"].tolist() == [1, 2]  # versions of one handle
    assert len(set(records["subject"].tolist())) == 1
    wait = events[events["kind"] == EventKind.EVENT_WAIT][0]
    assert (wait["subject"], wait["a"]) == (records["subject"][0], 2)
    assert job.trace.streams[wait["stream"]] == (0, 0)
    assert job.trace.streams[records["stream"][0]] == (0, side.stream_id)


def test_cuda_graph_capture_takes_work_out_and_replay_repeats_it() -> None:
    with maya_core.emulate("h100") as job:
        x = torch.zeros(1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2 + 1
            y.relu_()
        for _ in range(3):
            graph.replay()
    ops = [job.trace.calls[s].op for s in job.trace.ops["subject"]]
    assert [op for op in ops if op != "aten::zero_"] == ["aten::mul.Tensor", "aten::add.Tensor", "aten::relu_"] * 3
    assert (job.trace.events["kind"] == EventKind.GRAPH_LAUNCH).sum() == 3


def test_make_graphed_callables(device: EmulatedDevice) -> None:
    model = torch.nn.Linear(16, 16).cuda()
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(4, 16, device="cuda", requires_grad=True),))
    graphed(torch.randn(4, 16, device="cuda", requires_grad=True)).sum().backward()
    assert model.weight.grad is not None


def test_random_state(device: EmulatedDevice) -> None:
    torch.manual_seed(7)
    first = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(7)
    assert torch.equal(first.cpu(), torch.rand(5, device="cuda").cpu())
    state = torch.cuda.get_rng_state()
    second = torch.rand(5, device="cuda")
    assert not torch.equal(first.cpu(), second.cpu())
    torch.cuda.set_rng_state(state)
    assert torch.equal(second.cpu(), torch.rand(5, device="cuda").cpu())
    assert torch.cuda.initial_seed() == 7
    assert len(torch.cuda.default_generators) == 1


def test_device_randomness_leaves_the_cpu_generator_alone(device: EmulatedDevice) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    torch.rand(100, device="cuda")
    torch.nn.functional.dropout(torch.ones(10, device="cuda"))
    assert torch.equal(torch.rand(4), expected)


def test_pinned_memory(device: EmulatedDevice) -> None:
    pinned = torch.randn(100).pin_memory()
    assert pinned.is_pinned()
    assert pinned[10:].is_pinned()
    assert not torch.randn(100).is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), pinned)
    assert torch.empty(10, pin_memory=True).is_pinned()


def test_nvtx_profiler_and_cudart(device: EmulatedDevice) -> None:
    assert torch.cuda.nvtx.range_push("step") == 0
    assert torch.cuda.nvtx.range_pop() == 0
    with torch.cuda.nvtx.range("forward"):
        torch.ones(2, device="cuda")
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.check_error(0)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        torch.ones(10, device="cuda").sum()
    assert "aten::sum" in {event.key for event in profile.key_averages()}


def test_storage_resize_frees_and_takes_memory(device: EmulatedDevice) -> None:
    x = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() == 4 << 20
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    x.untyped_storage().resize_(4 << 20)
    assert torch.cuda.memory_allocated() == 4 << 20


def test_save_and_load(device: EmulatedDevice, tmp_path) -> None:
    model = torch.nn.Linear(8, 8)
    weight = model.weight.detach().clone()
    torch.save(model.cuda().state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")
    assert loaded["weight"].is_cuda
    assert torch.equal(loaded["weight"].cpu(), weight)
    assert torch.load(tmp_path / "model.pt", map_location="cpu")["weight"].device.type == "cpu"


def test_data_loader_with_workers_and_pinned_memory(device: EmulatedDevice) -> None:
    torch.ones(1, device="cuda")  # workers are forked after the device is in use
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
    batches = [batch.cuda(non_blocking=True) for (batch,) in loader if batch.is_pinned()]
    assert torch.equal(torch.cat(batches).cpu(), torch.arange(64.0).view(16, 4))


def test_a_forked_child_may_not_use_the_device_as_with_cuda() -> None:
    code = (
        "import torch, maya_core, os\n"
        "with maya_core.emulate('h100'):\n"
        "    torch.ones(1, device='cuda')\n"
        "    if os.fork() == 0:\n"
        "        os._exit(7 if torch.cuda._is_in_bad_fork() else 1)\n"
        "    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_one_emulation_at_a_time(device: EmulatedDevice) -> None:
    with pytest.raises(maya_core.MayaError, match="running already"), maya_core.emulate("h100"):
        pass
    assert torch.cuda.is_available()


def test_unknown_gpu_is_named_with_the_nearest() -> None:
    with pytest.raises(maya_core.MayaError, match=r"unknown GPU 'h1000'[\s\S]*h100"):
        maya_core.emulate("h1000")


def test_tensors_of_two_devices_are_refused_as_on_a_gpu() -> None:
    with maya_core.emulate("h100", gpus_per_node=2):
        here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        for other, name in ((torch.ones(3), "cpu"), (there, "cuda:1")):
            with pytest.raises(RuntimeError, match=f"found at least two devices, cuda:0 and {name}"):
                here + other
        assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a scalar may come from the host
        assert here[torch.tensor([0, 2])].shape == (2,)  # and so may indices
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            torch.nn.Linear(3, 3)(here)


def test_lists_are_copied_between_devices_one_by_one() -> None:
    with maya_core.emulate("h100", gpus_per_node=2) as job:
        here = [torch.zeros(2, device="cuda:0"), torch.zeros(3, device="cuda:0")]
        torch._foreach_copy_(here, [torch.ones(2), torch.full((3,), 2.0, device="cuda:1")])
        back = [torch.zeros(2), torch.zeros(3)]
        torch._foreach_copy_(back, here)
        assert [tensor.tolist() for tensor in back] == [[1, 1], [2, 2, 2]]
    copies = job.trace.events[job.trace.events["kind"] == EventKind.OP]["subject"]
    assert [job.trace.calls[i].op for i in copies].count("aten::copy_") == 4


def test_data_parallel_over_two_gpus() -> None:
    with maya_core.emulate("h100", gpus_per_node=2):
        model = torch.nn.DataParallel(torch.nn.Linear(4, 4, bias=False).cuda())
        out = model(torch.ones(6, 4, device="cuda"))
        out.sum().backward()
        assert (out.shape, out.device) == ((6, 4), torch.device("cuda:0"))
        assert model.module.weight.grad.device == torch.device("cuda:0")
        assert torch.cuda.max_memory_allocated(1) > 0


SYMBOLS = [
    "is_available",
    "device_count",
    "current_device",
    "set_device",
    "device",
    "synchronize",
    "init",
    "is_initialized",
    "_lazy_init",
    "_lazy_call",
    "_is_in_bad_fork",
    "_is_compiled",
    "_device_count_nvml",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "empty_cache",
    "mem_get_info",
    "memory_snapshot",
    "memory._snapshot",
    "memory._record_memory_history",
    "memory._dump_snapshot",
    "MemPool",
    "use_mem_pool",
    "OutOfMemoryError",
    "Stream",
    "stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "ExternalStream",
    "Event",
    "manual_seed",
    "manual_seed_all",
    "get_rng_state",
    "get_rng_state_all",
    "set_rng_state",
    "set_rng_state_all",
    "initial_seed",
    "default_generators",
    "CUDAGraph",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "nvtx.range_push",
    "nvtx.range_pop",
    "nvtx.range",
    "cudart",
    "check_error",
    "is_bf16_supported",
    "get_device_properties",
    "get_device_name",
    "get_device_capability",
    "utilization",
    "power_draw",
    "nccl.version",
    "FloatTensor",
    "LongTensor",
    "HalfTensor",
    "BFloat16Tensor",
]
C_SYMBOLS = [
    "init",
    "getDeviceCount",
    "getDevice",
    "setDevice",
    "exchangeDevice",
    "maybeExchangeDevice",
    "synchronize",
    "isInBadFork",
    "canDeviceAccessPeer",
    "memoryStats",
    "resetPeakMemoryStats",
    "emptyCache",
    "memorySnapshot",
    "getCurrentStream",
    "getDefaultStream",
    "setStream",
    "getCurrentRawStream",
    "clearCublasWorkspaces",
]


def test_what_frameworks_ask_for_is_there_and_answers(device: EmulatedDevice) -> None:
    torch.ones(1, device="cuda")
    for name in SYMBOLS:
        target = torch.cuda
        for part in name.split("."):
            target = getattr(target, part)
    for name in C_SYMBOLS:
        assert callable(getattr(torch._C, f"_cuda_{name}")), name
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    assert torch.cuda.utilization() >= 0
    assert torch.cuda.power_draw() > 0
    assert torch.cuda.get_rng_state_all()[0].shape == (16,)
    assert torch.cuda._device_count_nvml() == 1
    assert torch.cuda.memory._snapshot()["segments"]
    assert torch.cuda.ExternalStream(0x1234560).cuda_stream == 0x1234560
    assert not torch.cuda.is_current_stream_capturing()
    torch.backends.cuda.matmul.allow_tf32 = True
    assert torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            return grad * 2

    with torch.autocast("cuda", torch.float16):
        assert Double.apply(torch.ones(2, device="cuda", requires_grad=True)).dtype == torch.float16
