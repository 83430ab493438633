"""Elementwise ops, copies and fills. Follows Loops.cuh, Copy.cu, FillKernel.cu of ATen/native/cuda."""

from __future__ import annotations

from pathlib import Path

from maya_core.hardware.dtypes import HALVES
from maya_core.hardware.platform import Platform
from maya_core.ops import tensor_iterator
from maya_core.ops.kernel import Copy, Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import Assume, Sample, aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.traffic import elementwise_pattern, layout, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor

# Ops that use metadata only: nothing is launched.
METADATA = ("maya::attention_choice",) + aten(
    "empty", "resize_", "set_", "_use_cudnn_ctc_loss", "_cudnn_init_dropout_state", "is_set_to", "_has_same_storage_numel",
    "_nested_tensor_from_mask_left_aligned",
)  # fmt: skip

# One kernel over every element of the result.
_LINES = Path(__file__).with_name("pointwise.txt").read_text().splitlines()
POINTWISE = [name for line in _LINES if not line.startswith("#") for name in line.split()]

# Ops that write elements without reading any.
FILLS = ("fill_", "zero_", "arange", "range", "linspace", "logspace", "full", "fill")
_WRITES_FIRST = ("fill_", "zero_")

# Pairs of dtypes, from and to, whose copy has a vectorized kernel (Copy.cu, direct_copy_kernel_cuda).
VECTORIZED_CASTS = {("Float", half) for half in HALVES}
VECTORIZED_CASTS_2_15 = (
    VECTORIZED_CASTS | {(half, "Float") for half in HALVES} | {("Int", "Long"), ("Bool", "Long"), ("Bool", "Double")}
)


@op(*METADATA)
def nothing(call: Call, platform: Platform) -> Work:
    return Work()


def one_kernel(pattern: str | None, inputs: list[Tensor], results: list[Tensor]) -> list[Streaming]:
    """The kernel over these tensors, or as many kernels as 32-bit indices need. By default, the layout of the operands decides the pattern."""
    kernel = streaming(pattern or elementwise_pattern(inputs, results[0]), inputs, results)
    parts = tensor_iterator.parts(results[0], inputs)
    return [kernel] if parts == 1 else [kernel.part(parts)] * parts


@op(*aten(*(name + ending for name in POINTWISE for ending in ("", "_"))))
def elementwise(call: Call, platform: Platform) -> Work:
    results = call.results or call.inputs[:1]
    return Work().launch(*(one_kernel(None, call.inputs, results) if results else [small()]))


@op("aten::glu_backward")
def glu_backward(call: Call, platform: Platform) -> Work:
    """A special kernel over both halves (ActivationGluKernel.cu)."""
    return Work().launch(*one_kernel("elementwise", call.inputs, call.results or call.inputs[:1]))


@op(*aten(*FILLS))
def fill(call: Call, platform: Platform) -> Work:
    inputs = call.inputs[1:] if call.name.removeprefix("aten::") in _WRITES_FIRST else call.inputs
    return Work().launch(*one_kernel("fill", inputs, call.results or call.inputs[:1]))


def same_layout(to: Tensor, source: Tensor) -> bool:
    """Whether a copy is a plain memcpy (Copy.cu, copy_requires_temporaries)."""
    return to.dtype == source.dtype and to.sizes == source.sizes and to.strides == source.strides and to.is_dense


def cast_pattern(source: str, to: str, platform: Platform) -> str:
    vectorized = VECTORIZED_CASTS_2_15 if platform.since(2, 15) else VECTORIZED_CASTS
    return "elementwise" if (source, to) in vectorized else "cast"


@op(*aten("copy_", "_copy_from"))
def copy(call: Call, platform: Platform) -> Work:
    """A memcpy if both have the same layout in memory, otherwise a kernel (Copy.cu, copy_device_to_device)."""
    to, source = call.inputs[:2]
    if to.device != source.device:
        return Work().launch(Copy("h2d" if to.device == "cuda" else "d2h", to.nbytes))
    if same_layout(to, source):
        return Work().launch(Copy("d2d", to.nbytes))
    pattern = layout([source], to)
    if pattern == "elementwise" and to.dtype != source.dtype:
        pattern = cast_pattern(source.dtype, to.dtype, platform)
    kernel = streaming(pattern, [source], [to])
    parts = tensor_iterator.parts(to, [source])
    return Work().launch(*([kernel] if parts == 1 else [kernel.part(parts)] * parts))


@op("aten::_local_scalar_dense")
def item(call: Call, platform: Platform) -> Work:
    return Work().launch(Copy("d2h", call.inputs[0].itemsize))


@op("aten::pow.Scalar")
def pow_of_number(call: Call, platform: Platform) -> Work:
    """The base is turned into a tensor first."""
    work = Work().out(0)
    work.temporary(8)
    return work.launch(small(), streaming("strided", call.inputs, call.results))


@op("aten::eye")
def eye(call: Call, platform: Platform) -> Work:
    diagonal = min(call.results[0].sizes)
    return Work().launch(streaming("fill", [], call.results), Streaming("scatter", 0, 32 * diagonal, diagonal))


@op("aten::equal")
def equal(call: Call, platform: Platform) -> Work:
    """Compares, reduces to one value, and copies that to the host."""
    first, second = call.inputs[:2]
    count = first.numel
    return Work().launch(
        Streaming("elementwise", first.nbytes + second.nbytes, count, count),
        Streaming("reduction", count, 1, count, count),
        Copy("d2h", 1),
    )


values(*aten("fill_", "zero_"), only_writes=True)
values(*aten("clone", "_to_copy"), keeps_uniform=True)
values(
    *aten("abs", "exp", "exp2", "sqrt", "rsqrt", "softplus", "square", "erfc", "_cdist_forward"), sample=Sample.POSITIVE
)
values(
    *aten("add", "add_", "mul", "mul_", "div", "div_", "pow", "pow_", "maximum", "minimum", "lerp", "lerp_", "clamp", "clamp_", "clamp_min",
          "clamp_min_", "clone", "_to_copy", "copy_", "where", "cat", "stack", "index", "index_select", "gather", "log1p", "addcmul"),
    sample=Sample.AS_INPUTS,
)  # fmt: skip
values(*aten("relu", "relu_"), sample=Sample.POSITIVE)
values(*aten("_log_softmax", "log_sigmoid_forward"), sample=Sample.NEGATIVE)
values(*aten("sigmoid", "sigmoid_", "hardsigmoid", "_softmax"), sample=Sample.UNIT)
values(*aten("isfinite"), assume=Assume.TRUE)
values(*aten("isnan", "isinf", "isposinf", "isneginf"), assume=Assume.FALSE)
values(*aten("eq", "eq_"), assume=Assume.SAME_IS_EQUAL)
values(*aten("ne", "ne_"), assume=Assume.COMPARE_INFINITY)
values(*aten("masked_fill", "masked_fill_", "_resize_output_", "resize_as_"), mixes_devices=True)


# ---- results ----
@describe("aten::glu_jvp")
def glu_jvp(glu: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(glu)


@describe("aten::glu_backward_jvp")
def glu_backward_jvp(grad_x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(grad_x)
