"""Nested tensors: batches of sequences of different lengths. Follows ATen/native/nested/cuda and NestedTensorMath.cpp.

Those of the strided layout keep all sequences in one buffer. Their elementwise ops, products and softmax run as torch composes them from dense
ops, on the buffer or on one sequence after the other; this file has the ops for which CUDA has kernels of its own. Those of the jagged layout
are Python objects around dense tensors, whose ops reach the device by themselves.
"""

from __future__ import annotations

from typing import Any

from maya_core.hardware.platform import Platform
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op
from maya_core.ops.rules import Rules, as_on_cpu, nested_rule, rule
from maya_core.ops.work import Work
from maya_core.trace.call import Call

for _name in ("_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"):
    rule(f"aten::{_name}")(as_on_cpu(_name))


@op(*aten("_jagged_to_padded_dense_forward", "_padded_dense_to_jagged_forward"))
def between_layouts(call: Call, platform: Platform) -> Work:
    """One thread for each element of the padded tensor."""
    return Work().launch(*one_kernel("gather", call.inputs, call.results))


@op("aten::to_padded_tensor", "aten::_nested_from_padded")
def padded(call: Call, platform: Platform) -> Work:
    """One kernel. Sizes and offsets of the sequences are copied to the device first."""
    return Work().launch(*one_kernel("gather", call.inputs[:1], call.results))


def _like(nested: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """A nested tensor over another buffer, with sequences of the same sizes."""
    answer: torch.Tensor = torch.ops.aten._nested_view_from_buffer(
        buffer,
        torch.ops.aten._nested_tensor_size(nested),
        torch.ops.aten._nested_tensor_strides(nested),
        torch.ops.aten._nested_tensor_storage_offsets(nested),
    )
    return answer


def _of_sizes(buffer: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """A nested tensor over a buffer, with contiguous sequences of these sizes."""
    strides, offsets = torch.ops.aten._nested_compute_contiguous_strides_offsets(sizes)
    answer: torch.Tensor = torch.ops.aten._nested_view_from_buffer(buffer, sizes, strides, offsets)
    return answer


def _buffer(nested: torch.Tensor) -> torch.Tensor:
    return nested.contiguous().values()


@rule("aten::_nested_from_padded")
def nested_from_padded(
    rules: Rules, padded: torch.Tensor, sizes: torch.Tensor, fuse_transform_0213: bool = False
) -> torch.Tensor:
    """The sequences of a padded tensor. `fuse_transform_0213` also exchanges its two middle dimensions, which puts heads side by side."""
    buffer = padded.new_empty(int(sizes.prod(1).sum()))
    rules.record("aten::_nested_from_padded", [padded, sizes.to(torch.int64)], [buffer])
    known = rules.on_host(lambda host: torch.ops.aten._nested_from_padded(host, sizes, fuse_transform_0213), padded)
    if known is None:
        rules.forget(buffer)
    else:
        rules.remember(buffer, known.values())
    return _of_sizes(buffer, sizes)


@nested_rule("aten::to_padded_tensor")
def to_padded_tensor(
    rules: Rules, self: torch.Tensor, padding: float, output_size: list[int] | None = None
) -> torch.Tensor:
    sizes = torch.ops.aten._nested_tensor_size(self)
    shape = [len(sizes), *sizes.max(0).values.tolist()]
    if output_size is not None:
        if len(output_size) != len(shape) or any(given < size for given, size in zip(output_size, shape, strict=True)):
            raise RuntimeError(
                "Value in output_size is less than NestedTensor padded size. Truncation is not supported."
            )
        shape = list(output_size)
    buffer = _buffer(self)
    out = buffer.new_empty(shape)
    rules.record("aten::to_padded_tensor", [buffer, sizes.to(torch.int64)], [out])
    known = rules.value(buffer)
    if known is None:
        rules.forget(out)
        return out
    return rules.remember(out, torch.nested.to_padded_tensor(_like(self, known), padding, shape))


@nested_rule("aten::native_layer_norm")
def native_layer_norm(
    rules: Rules,
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = _buffer(input).view(-1, *normalized_shape)
    out, mean, rstd = torch.ops.aten.native_layer_norm(rows, normalized_shape, weight, bias, eps)
    return _like(input, out.view(-1)), mean.view(-1), rstd.view(-1)


@nested_rule("aten::native_layer_norm_backward")
def native_layer_norm_backward(
    rules: Rules,
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: list[bool],
) -> tuple[Any, ...]:
    grad, rows = (_buffer(nested).view(-1, *normalized_shape) for nested in (grad_out, input))
    per_row = [-1] + [1] * len(normalized_shape)
    found = torch.ops.aten.native_layer_norm_backward(
        grad, rows, normalized_shape, mean.view(per_row), rstd.view(per_row), weight, bias, output_mask
    )
    return (_like(input, found[0].view(-1)) if output_mask[0] else None, *found[1:])


@nested_rule("aten::_native_multi_head_attention")
def native_multi_head_attention(
    rules: Rules,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What nn.MultiheadAttention and nn.TransformerEncoder call without gradients: attention of one sequence after the other."""
    if query is not key or key is not value or mask is not None or need_weights:
        raise NotImplementedError(
            "Maya emulates _native_multi_head_attention of strided nested tensors for self-attention without a mask and without weights. "
            "Use layout=torch.jagged, or torch.backends.mha.set_fastpath_enabled(False)."
        )
    together = torch.nn.functional.linear(_buffer(query).view(-1, embed_dim), qkv_weight, qkv_bias)
    lengths = torch.ops.aten._nested_tensor_size(query)[:, 0].tolist()
    attended = []
    for sequence in torch.ops.aten.split_with_sizes(together, lengths):
        parts = sequence.view(1, -1, 3, num_head, embed_dim // num_head).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(*parts.unbind(0))
        attended.append(out.transpose(1, 2).reshape(-1, embed_dim))
    projected = torch.nn.functional.linear(torch.cat(attended), proj_weight, proj_bias)
    return _like(query, projected.view(-1)), None


@rule("aten::_padded_dense_to_jagged_forward")
def padded_dense_to_jagged_forward(
    rules: Rules, dense: torch.Tensor, offsets: list[torch.Tensor], total: int | None = None
) -> torch.Tensor:
    """The sequences of a padded tensor, one after the other. Their number of elements is the last offset, if nobody has said it."""
    if total is None:
        rules.wait(dense)
        last = rules.read(offsets[0][-1])
        total = int(last.value) if last is not None else dense.shape[:-1].numel()
    out = dense.new_empty((total, dense.shape[-1]))
    rules.record("aten::_padded_dense_to_jagged_forward", [dense, *offsets], [out])
    known = rules.on_host(
        lambda padded, bounds: torch.ops.aten._padded_dense_to_jagged_forward(padded, [bounds], total),
        dense,
        offsets[0],
    )
    if known is None or len(offsets) > 1:
        rules.forget(out)
        return out
    return rules.remember(out, known)
