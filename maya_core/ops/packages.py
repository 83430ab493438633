"""Kernels of packages that are compiled with nvcc or written in Triton: Transformer Engine, Megatron's fused functions, mamba_ssm, DeepSpeed's
quantizer.

Each is one kernel that reads its inputs and writes its outputs with vector loads, whatever their dtypes and layouts, so it has none of
TensorIterator's costs for casts and strides. None of them was measured. Kernels of a package that are not named here follow the rule of
the package's namespace.
"""

from __future__ import annotations

from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import Streaming
from maya_core.ops.registry import op
from maya_core.ops.traffic import moved
from maya_core.ops.work import Work
from maya_core.trace.call import Call

# Packages whose kernels all stream, except those named below.
NAMESPACES = ("transformer_engine", "megatron", "mamba_ssm", "deepspeed")

MULTI_TENSOR = tuple(f"transformer_engine::multi_tensor_{name}" for name in ("scale", "l2norm", "adam", "sgd"))
ROWS_MOVED = tuple(
    f"transformer_engine::{name}" for name in ("permute", "unpermute", "unpermute_backward", "sort_chunks")
)


def streamed(call: Call, platform: Platform) -> Work:
    return _one("elementwise", call)


def _one(pattern: str, call: Call) -> Work:
    read, written = sum(map(moved, call.inputs)), sum(map(moved, call.results))
    elements = max((tensor.numel for tensor in (*call.results, *call.inputs)), default=1)
    return Work().launch(Streaming(pattern, read, written, elements))


@op("transformer_engine::amax")
def amax(call: Call, platform: Platform) -> Work:
    source = call.inputs[0]
    return Work().launch(
        Streaming("reduction", moved(source), sum(map(moved, call.results)), source.numel, source.numel)
    )


@op(*MULTI_TENSOR)
def multi_tensor(call: Call, platform: Platform) -> Work:
    return _one("multi_tensor", call)


@op(*ROWS_MOVED)
def rows_moved(call: Call, platform: Platform) -> Work:
    return _one("gather", call)
