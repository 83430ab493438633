"""Reads measurements from profiler traces: which op launched which kernel, what is skipped, and how unusable files are explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from calibrate.kineto_traces import H100, KinetoTrace

from maya_core.calibrate import profiler_trace
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.ops.kernel import Copy, Gemm, Kernel, Streaming

HALF, FLOAT = "c10::BFloat16", "float"


def read(trace: KinetoTrace, tmp_path: Path, **more: object) -> profiler_trace.Measurements:
    return profiler_trace.read_trace(trace.write(tmp_path / "trace.json.gz"), find_gpu("h100"), **more)  # type: ignore[arg-type]


def seconds(found: profiler_trace.Measurements) -> dict[Kernel, float]:
    return {row.kernel: round(row.seconds, 9) for row in found.measured}


def test_a_kernel_is_its_ops_and_the_first_run_does_not_count(tmp_path: Path) -> None:
    trace = KinetoTrace()
    for us in (500.0, 100.0, 102.0, 104.0):
        trace.linear(4096, 2048, 1024, us)
    found = read(trace, tmp_path)
    [row] = found.measured
    assert row.kernel == Gemm("bfloat16", 1, 4096, 2048, 1024, 0)
    assert (row.seconds, row.samples) == (pytest.approx(102e-6), 3)
    assert (found.counts.kernels, found.counts.used, found.counts.warm_up) == (4, 3, 1)


def test_numbers_of_the_host_lists_of_tensors_and_copies(tmp_path: Path) -> None:
    trace = KinetoTrace()
    with trace.op("aten::mul", (FLOAT, [1024, 1024]), ("double", [])):  # x * 2.5
        trace.kernel("void at::native::vectorized_elementwise_kernel<4, AUnaryFunctor<float>>", 5.0)
    with trace.op("aten::cat", ("TensorList", [[512, 256], [512, 256]]), 1):
        trace.kernel("void CatArrayBatchedCopy<OpaqueType<4u>, unsigned int, 2, 128, 1>", 6.0)
    with trace.op("aten::sum", (FLOAT, [4096, 1024]), [1], False, None):
        trace.kernel("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", 9.0)
    with trace.op("aten::_to_copy", (FLOAT, [1024]), 6, 0, 0, False, False, None):
        with trace.op("aten::copy_", (FLOAT, [1024]), (FLOAT, [1024]), False):
            trace.kernel("Memcpy HtoD (Pinned -> Device)", 2.0, cat="gpu_memcpy", bytes=4096)
    with trace.op("aten::zero_", (FLOAT, [64, 64])):
        with trace.op("aten::fill_", (FLOAT, [64, 64]), 0.0):
            trace.kernel("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", 3.0)
    found = seconds(read(trace, tmp_path))
    mib = 2**20
    assert found == {
        Streaming("elementwise", 4 * mib, 4 * mib, mib, 0): 5e-6,
        Streaming("cat", mib, mib, 2**18, 0): 6e-6,
        Streaming("reduction", 16 * mib, 4 * 4096, 4 * mib, 1024): 9e-6,
        Copy("h2d", 4096): 2e-6,
        Streaming("fill", 0, 4 * 4096, 4096, 0): 3e-6,
    }


def test_what_runs_beside_nccl_is_skipped_and_said(tmp_path: Path) -> None:
    trace = KinetoTrace()
    for _ in range(3):
        trace.add(1024, 1024, 10.0)
    busy = trace.free
    trace.all_reduce(2**20, 400.0, [0, 1, 2, 3, 4, 5, 6, 7], at=busy + 1)
    trace.now = trace.free = busy + 100
    trace.add(1024, 1024, 30.0)  # in the middle of it
    trace.now = trace.free = busy + 1000
    trace.add(1024, 1024, 10.0)
    found = read(trace, tmp_path)
    assert found.counts.contended == 1
    assert [row.seconds for row in found.measured] == [pytest.approx(10e-6)]
    [told] = found.collectives
    assert (told.op, told.bytes, told.ranks_per_node, told.nodes, told.network) == ("all_reduce", 2**21, 8, 1, "")
    assert told.seconds == pytest.approx(400e-6)


def test_collectives_across_nodes_have_their_network_and_the_least_wait(tmp_path: Path) -> None:
    trace = KinetoTrace()
    for us in (900.0, 300.0, 320.0, 310.0, 5000.0):  # the last waited for another rank
        trace.all_reduce(2**22, us, list(range(16)))
    trace.all_reduce(2**22, 100.0, [0, 1, 8])  # not as many on each node
    trace.add(64, 64, 2.0)
    found = read(trace, tmp_path, gpus_per_node=8, network="infiniband-ndr")
    [told] = found.collectives
    assert (told.ranks_per_node, told.nodes, told.network, told.samples) == (8, 2, "infiniband-ndr", 4)
    assert told.seconds == pytest.approx(303e-6, rel=0.01)
    assert found.counts.nccl_untold == 1


def test_second_kernels_of_a_product_belong_to_it_and_others_do_not_pair(tmp_path: Path) -> None:
    trace = KinetoTrace()
    trace.linear(64, 64, 8192, 20.0, "void cublasLt::splitKreduce_kernel<32, 16, int>")
    trace.linear(128, 64, 8192, 20.0, "somebody_elses_kernel")
    trace.kernel("triton_poi_fused_add_0", 4.0)  # launched by no op
    found = read(trace, tmp_path)
    assert seconds(found) == {Gemm("bfloat16", 1, 64, 64, 8192, 0): 21e-6}
    assert found.counts.unpaired == {"aten::mm": 2}
    assert found.counts.without_op == 1


def test_the_parts_of_attention_backward_are_measured_together(tmp_path: Path) -> None:
    trace = KinetoTrace()
    by_token = ([2, 16, 1024, 64], [1024 * 16 * 64, 64, 16 * 64, 1])
    heads, lse = (HALF, *by_token), (FLOAT, [2, 16, 1024])
    seed = ("unsigned long", [2]), ("unsigned long", [])
    arguments = (heads, heads, heads, heads, heads, lse, None, None, 1024, 1024, 0.0, True, *seed, None)
    with trace.op("aten::_scaled_dot_product_flash_attention_backward", *arguments):
        with trace.op("aten::_flash_attention_backward"):
            for name, us in (("dot_do_o", 5.0), ("flash_bwd_dq_dk_dv_loop_seqk_parallel", 80.0), ("convert_dq", 4.0)):
                trace.kernel(f"void pytorch_flash::{name}_kernel<Flash_bwd_kernel_traits<64>>", us)
    [row] = read(trace, tmp_path).measured
    assert (row.family, row.model) == ("attention", "flash_backward")
    assert row.seconds == pytest.approx(89e-6)


def test_products_in_tf32_are_taken_as_such(tmp_path: Path) -> None:
    trace = KinetoTrace()
    with trace.op("aten::mm", (FLOAT, [512, 256]), (FLOAT, [256, 128])):
        trace.kernel("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>", 7.0)
    found = read(trace, tmp_path)
    assert [row.kernel for row in found.measured] == [Gemm("tf32", 1, 512, 128, 256, 1)]
    assert found.counts.tf32 == 1


def test_older_traces_are_read_for_what_they_have(tmp_path: Path) -> None:
    trace = KinetoTrace(strides=False, values=False)
    trace.add(512, 512, 4.0)  # how much is added does not matter
    with trace.op("aten::sum", (FLOAT, [512, 512]), [1], False, None):  # over which dimension does
        trace.kernel("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", 9.0)
    found = read(trace, tmp_path)
    assert [row.model for row in found.measured] == ["elementwise"]
    assert sum(found.counts.unknown.values()) == 1
    assert not found.counts.strides


def test_several_ranks_are_read_together(tmp_path: Path) -> None:
    paths = []
    for rank, us in enumerate((10.0, 12.0, 14.0)):
        trace = KinetoTrace()
        trace.add(256, 256, us)
        paths.append(trace.write(tmp_path / f"rank{rank}.json"))
    [row] = profiler_trace.measure(paths, find_gpu("h100")).measured
    assert (row.seconds, row.samples) == (pytest.approx(12e-6), 3)


def test_the_gpu_is_the_traces_own() -> None:
    assert profiler_trace.gpu_by_driver_name("NVIDIA H100 80GB HBM3") == find_gpu("h100")
    assert profiler_trace.agreed_gpu(["NVIDIA H100 80GB HBM3"], None, "t.json").name == "h100"
    assert profiler_trace.agreed_gpu(["NVIDIA A100-PG509-200"], "a100", "t.json").name == "a100"
    with pytest.raises(MayaError, match="'NVIDIA A100-PG509-200', is not in the catalog"):
        profiler_trace.agreed_gpu(["NVIDIA A100-PG509-200"], None, "t.json")
    with pytest.raises(MayaError, match="does not name its GPU"):
        profiler_trace.agreed_gpu([], None, "t.json")
    with pytest.raises(MayaError, match=r"was measured on NVIDIA H100 80GB HBM3 \(h100\), not on a100"):
        profiler_trace.agreed_gpu(["NVIDIA H100 80GB HBM3"], "a100", "t.json")
    trace = KinetoTrace().content | {"deviceProperties": [H100, H100 | {"id": 1, "name": "other"}]}
    trace["traceEvents"].append({"cat": "kernel", "args": {"device": 0}})
    assert profiler_trace.device_names(trace) == ["NVIDIA H100 80GB HBM3"]  # work ran on that one


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'{"traceEvents": []}', "has no events"),
        (b'{"nodes": []}', "is not a profiler trace"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xed", "is truncated"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(MayaError, match=said) as error:
        profiler_trace.load(path)
    assert str(path) in error.value.problem and "torch.profiler" in error.value.advice


def test_a_trace_cut_off_in_the_middle(tmp_path: Path) -> None:
    trace = KinetoTrace()
    trace.add(64, 64, 1.0)
    path = trace.write(tmp_path / "cut.json")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(MayaError, match="is truncated"):
        profiler_trace.load(path)
    with pytest.raises(MayaError, match="cannot be read"):
        profiler_trace.load(tmp_path / "none.json")


def test_a_trace_without_shapes(tmp_path: Path) -> None:
    trace = KinetoTrace()
    with trace.op("aten::add"):
        trace.kernel("void at::native::vectorized_elementwise_kernel<4>", 4.0)
    with pytest.raises(MayaError, match="has no shapes") as error:
        read(trace, tmp_path)
    assert "record_shapes=True" in error.value.advice
    trace.all_reduce(2**20, 50.0, [0, 1])  # collectives say their sizes themselves
    found = read(trace, tmp_path)
    assert (len(found.measured), len(found.collectives), found.counts.shapes) == (0, 1, False)


def test_a_real_trace_of_a_run_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        torch.nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
    profile.export_chrome_trace(str(path))
    assert any("Concrete Inputs" in event.get("args", {}) for event in json.loads(path.read_text())["traceEvents"])
    with pytest.raises(MayaError, match="has no GPU activity"):
        profiler_trace.read_trace(path, find_gpu("h100"))


def test_ops_of_a_real_profile_are_found_by_their_arguments(tmp_path: Path) -> None:
    """The record of a CPU profile is that of a GPU's: every op of it can be made again on the emulated GPU."""
    from maya_core.calibrate.recorded import RecordedCall, Replay, overload

    path = tmp_path / "cpu.json"
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        torch.nn.functional.cross_entropy(model(torch.randn(4, 64)), torch.zeros(4, dtype=torch.int64)).backward()
        optimizer.step()
    profile.export_chrome_trace(str(path))
    calls = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "cpu_op" and "Input type" in event["args"]:
            call = RecordedCall.of(event["name"], event["args"], kernel_names=("multi_tensor_apply<float>",))
            found = overload(call.name, call.types)
            if found is not None and found[1]:
                calls[call] = found[0]
    with Replay(find_gpu("h100")) as replay:
        launched = {call.name: [kernel.model for kernel in replay.kernels(call)] for call in calls}
    assert launched["aten::addmm"] == ["float32"]
    assert launched["aten::native_layer_norm"] == ["norm"]
    assert launched["aten::_foreach_lerp_"] == ["multi_tensor"]
    assert {"aten::nll_loss_forward", "aten::gelu_backward", "aten::_foreach_addcdiv_"} <= set(launched)
