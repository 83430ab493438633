"""Calls give the kernels that real CUDA torch launches over a fake runtime: their number, patterns and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops import oracle_figures
from ops.op_cases import CASES
from python_calls import python_calls

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.attention_choice import settled
from maya_core.ops.kernel import (
    Attention,
    Convolution,
    Copy,
    Gemm,
    GroupedGemm,
    Kernel,
    Recurrent,
    Streaming,
    Unknown,
)
from maya_core.ops.plan import kernels_of
from maya_core.torch_seam.version import installed
from maya_core.trace.call import Call, Tensor, packed

MIB = 2**20


def t(*sizes: int, dtype: str = "Float", strides: tuple[int, ...] | None = None, device: str = "cuda") -> Tensor:
    return Tensor(dtype, sizes, strides or packed(sizes), device)


def half(*sizes: int, **more: Any) -> Tensor:
    return t(*sizes, dtype="BFloat16", **more)


def kernels(op: str, results: list[Any], gpu: str = "h100", **arguments: Any) -> list[Kernel]:
    platform = Platform(find_gpu(gpu))
    return kernels_of(
        settled(Call(f"aten::{op}", list(arguments), list(arguments.values()), results), platform), platform
    )


def one(op: str, results: list[Any], **arguments: Any) -> Kernel:
    [kernel] = kernels(op, results, **arguments)
    return kernel


def families(call: Call, platform: Platform) -> set[str]:
    return {kernel.family for kernel in kernels_of(call, platform)}


# ---- against the oracle ----
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_those_of_cuda(device: EmulatedDevice, case: str) -> None:
    expected = oracle_figures.figures_of(installed().version)[case]
    assert oracle_figures.disagreement(expected, *oracle_figures.emulated(device, case)) is None


def test_every_call_of_a_training_step_is_described(device: EmulatedDevice) -> None:
    model = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(torch.randn(4, 64, 256, device="cuda")).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert len(device.planner.calls) > 50
    undescribed = {call.op for call in device.planner.calls if "unknown" in families(call, device.planner.platform)}
    assert undescribed == set()


def test_planning_a_call_is_little_work(device: EmulatedDevice) -> None:
    """A trace has thousands of distinct calls, and planning each takes about 12 us."""
    for make in CASES.values():
        make()()
    calls, platform = device.planner.calls, device.planner.platform
    counts = [python_calls(lambda call=call: kernels_of(call, platform)) for call in calls]
    assert sum(counts) / len(calls) < 100  # 75 now
    assert max(counts) < 500


# ---- bytes ----
def test_an_elementwise_op_reads_its_inputs_and_writes_its_result() -> None:
    x = t(1024, 1024)
    assert one("add.Tensor", [x], self=x, other=x, alpha=1) == Streaming("elementwise", 8 * MIB, 4 * MIB, MIB, 0)
    assert one("add_.Tensor", [x], self=x, other=x, alpha=1).sizes[:2] == (8 * MIB, 4 * MIB)
    assert one("add.out", [x], self=x, other=x, alpha=1, out=x).sizes[:2] == (8 * MIB, 4 * MIB)
    assert one("fill_.Scalar", [], self=x, value=0) == Streaming("fill", 0, 4 * MIB, MIB, 0)


def test_what_is_broadcast_is_read_once_at_its_own_size() -> None:
    x = t(1024, 1024)
    row, column = t(1024), t(1024, 1)
    assert one("mul.Tensor", [x], self=x, other=row).sizes[0] == 4 * MIB + 4096
    assert one("mul.Tensor", [x], self=x, other=column).model == "strided"
    expanded = t(1024, 1024, strides=(0, 1))
    assert one("mul.Tensor", [x], self=x, other=expanded).sizes[0] == 4 * MIB + 4096
    assert one("mul.Tensor", [x], self=x, other=t(dtype="Double", device="cpu")).sizes[0] == 4 * MIB


def test_gaps_are_read_by_sectors_and_slices_are_not() -> None:
    every_other = t(1024, 512, strides=(1024, 2))
    assert one("neg", [t(1024, 512)], self=every_other).sizes[0] == 2 * 1024 * 512 * 4
    left_half = t(1024, 512, strides=(1024, 1))
    assert one("neg", [t(1024, 512)], self=left_half).sizes[0] == 1024 * 512 * 4


@pytest.mark.parametrize(
    ("to", "source", "expected"),
    [
        (t(64, 32), t(64, 32), Copy("d2d", 8192)),
        (t(64, 32), t(64, 32, device="cpu"), Copy("h2d", 8192)),
        (t(64, 32, device="cpu"), t(64, 32), Copy("d2h", 8192)),
        (half(64, 32), t(64, 32), Streaming("elementwise", 8192, 4096, 2048, 0)),
        (t(64, 32), half(64, 32), Streaming("cast", 4096, 8192, 2048, 0)),
        (t(64, 32), t(64, 32, strides=(1, 64)), Streaming("transpose", 8192, 8192, 2048, 0)),
        (t(8, 4, 16), t(8, 4, 16, strides=(16, 128, 1)), Streaming("strided", 2048, 2048, 512, 0)),
    ],
)
def test_copies(to: Tensor, source: Tensor, expected: Kernel) -> None:
    assert one("copy_", [], self=to, src=source, non_blocking=False) == expected


def test_past_2_gib_an_op_is_done_in_equal_parts() -> None:
    x = t(65536, 16000)
    first, second = kernels("neg", [x], self=x)
    assert first == second
    assert first.sizes[0] == x.nbytes / 2


def test_nothing_is_launched_for_nothing() -> None:
    assert kernels("add.Tensor", [t(0, 4)], self=t(0, 4), other=t(0, 4), alpha=1) == []


# ---- products ----
@pytest.mark.parametrize(
    ("first", "second", "layout"),
    [
        (half(64, 32), half(32, 16, strides=(1, 32)), 0),  # x @ W.t()
        (half(64, 32), half(32, 16), 1),  # grad @ W
        (half(64, 32, strides=(1, 64)), half(32, 16), 2),  # grad.t() @ x
        (half(64, 32, strides=(1, 64)), half(32, 16, strides=(1, 32)), 3),
    ],
)
def test_layout_of_products(first: Tensor, second: Tensor, layout: int) -> None:
    assert one("mm", [half(64, 16)], self=first, mat2=second) == Gemm("bfloat16", 1, 64, 16, 32, layout)


def test_a_summand_that_is_no_bias_is_copied_first() -> None:
    x, w = half(64, 32), half(32, 16, strides=(1, 32))
    assert [k.family for k in kernels("addmm", [half(64, 16)], self=half(16), mat1=x, mat2=w, beta=1, alpha=1)] == [
        "gemm"
    ]
    copied = kernels("addmm", [half(64, 16)], self=half(64, 16), mat1=x, mat2=w, beta=1, alpha=1)
    assert [(k.family, k.model) for k in copied] == [("copy", "d2d"), ("gemm", "bfloat16")]


def test_groups_of_products() -> None:
    x, w, offsets = half(2048, 512), half(8, 512, 1024), t(8, dtype="Int")
    arguments = {"self": x, "mat2": w, "offs": offsets}
    assert kernels("_grouped_mm", [half(2048, 1024)], **arguments)[1] == GroupedGemm("bfloat16", 8, 2048, 1024, 512, 1)  # fmt: skip
    before = kernels("_grouped_mm", [half(2048, 1024)], "a100", **arguments)
    assert [k.family for k in before] == ["copy", *["gemm"] * 8]
    assert before[1].sizes == (1, 256, 1024, 512, 1)


# ---- attention, convolution, recurrent layers ----
def test_attention() -> None:
    q, kv = half(2, 16, 128, 64), half(2, 4, 256, 64)
    forward = one(
        "_scaled_dot_product_flash_attention", [q, t(2, 16, 128)], query=q, key=half(2, 16, 256, 64), value=half(2, 16, 256, 64),
        dropout_p=0.1, is_causal=True,
    )  # fmt: skip
    assert forward == Attention("flash", "forward", 2, 16, 16, 128, 256, 64, 64, 1, 0, 2)
    tokens = half(2, 128, 16, 64).permuted(0, 2, 1, 3)
    backward = kernels(
        "_scaled_dot_product_flash_attention_backward",
        [q, kv, kv],
        grad_out=tokens,
        query=q,
        key=kv,
        value=kv,
        out=tokens,
        is_causal=False,
    )
    assert [k.family for k in backward] == ["included", "attention", "included", "memory", "memory"]
    assert backward[1].sizes[:3] == (2, 16, 4)
    assert backward[3].sizes[:2] == (4 * kv.nbytes, kv.nbytes)


def test_convolution() -> None:
    x, w, y = half(8, 64, 56, 56), half(128, 64, 3, 3), half(8, 128, 28, 28)
    common = {
        "stride": [2, 2],
        "padding": [1, 1],
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": 1,
    }
    forward = kernels("convolution", [y], input=x, weight=w, bias=half(128), **common)
    assert forward[0] == Convolution("bfloat16", 0, 8, 64, 128, 1, 3136, 784, 9, 0, 4)
    assert (forward[1].family, forward[1].sizes[1]) == ("memory", y.nbytes)
    mask = {"output_mask": [True, True, True]}
    backward = kernels("convolution_backward", [x, w, half(128)], grad_output=y, input=x, weight=w, **common, **mask)
    assert [k.sizes[0] for k in backward if k.family == "convolution"] == [1, 2]
    assert backward[-1].model == "reduction"


def test_a_transposed_convolution_is_a_gradient() -> None:
    common = {
        "stride": [2, 2],
        "padding": [0, 0],
        "dilation": [1, 1],
        "transposed": True,
        "output_padding": [0, 0],
        "groups": 1,
    }
    kernel = one("convolution", [t(1, 32, 16, 16)], input=t(1, 64, 8, 8), weight=t(64, 32, 2, 2), bias=None, **common)
    assert kernel.sizes == (1, 1, 32, 64, 1, 256, 64, 4, 0, 4)


def test_recurrent_layers(device: EmulatedDevice) -> None:
    layer, x = torch.nn.LSTM(32, 48, 2, bidirectional=True).cuda(), torch.randn(7, 3, 32, device="cuda")
    called = oracle_figures.kernels_called(device, lambda: layer(x))
    assert [k for k in called if k.family == "recurrent"] == [Recurrent("float32", 0, 4, 2, 2, 7, 3, 32, 48, 4)]


# ---- chains ----
def test_softmax_backward_multiplies_first() -> None:
    x = t(512, 5000)
    product, sums = kernels("_softmax_backward_data", [x], grad_output=x, output=x, dim=-1, input_dtype=6)
    assert (product.model, product.sizes[:2]) == ("elementwise", (2 * x.nbytes, x.nbytes))
    assert sums == Streaming("softmax_backward", 2 * x.nbytes, x.nbytes, x.numel, 5000)


def test_layer_norm_backward_goes_over_rows_then_columns() -> None:
    x, w = t(4096, 1024), t(1024)
    arguments = {
        "grad_out": x,
        "input": x,
        "normalized_shape": [1024],
        "mean": t(4096, 1),
        "rstd": t(4096, 1),
        "weight": w,
        "bias": w,
    }
    by_row, by_column = kernels("native_layer_norm_backward", [x, w, w], **arguments, output_mask=[True, True, True])
    assert by_row == Streaming("norm_backward", 2 * x.nbytes, x.nbytes, x.numel, 1024)
    assert by_column == Streaming("column_reduction", 2 * x.nbytes, 2 * w.nbytes, x.numel, 4096)


def test_a_fused_optimizer_reads_gradients_and_updates_the_rest() -> None:
    lists = {name: [t(1024, 1024), t(1024)] for name in ("self", "grads", "exp_avgs", "exp_avg_sqs")}
    kernel = one("_fused_adamw_", [], **lists, max_exp_avg_sqs=[], state_steps=[t(), t()], grad_scale=None)
    each = 4 * (MIB + 1024)
    assert kernel == Streaming("multi_tensor", 4 * each, 3 * each, MIB + 1024, 0)


def test_an_embedding_reads_the_rows_it_is_asked_for() -> None:
    weight, index = t(50000, 512), t(2048, dtype="Long")
    kernel = one("index_select", [t(2048, 512)], self=weight, dim=0, index=index)
    assert kernel == Streaming("gather", 2048 * 512 * 4 + 2048 * 8, 2048 * 512 * 4, 2048 * 512, 512)


def test_an_op_nobody_described_moves_its_bytes_in_one_kernel() -> None:
    x = t(1000)
    assert one("an_op_of_tomorrow", [x, x], self=x, other=x) == Unknown("aten::an_op_of_tomorrow", 8000, 8000, 1000)


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_state_says_which_dimension_of_a_recurrent_input_is_the_batch(batch_first: bool) -> None:
    """cuDNN gets the steps as the first dimension, whatever `batch_first` is."""
    source, state = (Tensor("Half", sizes, packed(sizes), "cuda") for sizes in ((20, 64, 512), (2, 64, 256)))
    names = ["input", "hx", "mode", "hidden_size", "num_layers", "batch_first", "bidirectional", "batch_sizes"]
    arguments = [source, state, 2, 256, 2, batch_first, False, []]
    [kernel] = kernels_of(Call("aten::_cudnn_rnn", names, arguments, [source]), Platform(find_gpu("h100")))
    assert kernel.sizes == (0, 4, 2, 1, 20, 64, 512, 256, 2)
