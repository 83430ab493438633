"""Fused attention: flash, memory-efficient and cuDNN kernels, with the buffers that their backward passes need.

Follows ATen/native/transformers/cuda: flash_attn/flash_api.cpp, attention_backward.cu, mem_eff_attention. A backward pass consists of several
kernels that were only measured together, so the main one has the duration of all and the others are included in it. Copies of inputs and sums
over shared heads are kernels of ATen and priced separately.
"""

from __future__ import annotations

from typing import NamedTuple

from maya_core.hardware.dtypes import HALVES
from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import INCLUDED, Attention, Kernel, Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.reductions import add_reduction
from maya_core.ops.registry import aten, op, values
from maya_core.ops.rules import Rules, describe, rule
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor, packed

BY_TOKEN = aten(
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward", "_efficient_attention_backward",
    "_cudnn_attention_forward", "_cudnn_attention_backward",
)  # heads come after tokens in these  # fmt: skip


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _by_head(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with the dimensions (batch, heads, tokens, head)."""
    given = call["query"], call["key"], call["value"]
    if call.name not in BY_TOKEN:
        return given
    query, key, value = (t.permuted(0, 2, 1, 3) if len(t.sizes) == 4 else _one_sequence(t) for t in given)
    return query, key, value


def _one_sequence(tokens: Tensor) -> Tensor:
    """Packed sequences, (tokens, heads, head), seen as one sequence."""
    count, heads, head = tokens.sizes
    return Tensor(tokens.dtype, (1, heads, count, head), (count * heads * head, head, heads * head, 1), tokens.device)


def _kernel(call: Call, backend: str, direction: str) -> Attention:
    query, key, value = _by_head(call)
    batch, heads, queries, head = query.sizes
    kv_heads, keys = key.sizes[1], key.sizes[2]
    window = call.get("window_size_left")
    causal = bool(call.get("is_causal", False)) or bool(call.get("custom_mask_type", 0))
    sequences: float = 1
    if call.get("cum_seq_q") is not None and call.get("max_q") and call.name in BY_TOKEN:  # packed sequences
        sequences = max(1, call["cum_seq_q"].numel - 1)
        batch = int(sequences)
    return Attention(
        backend, direction, batch, heads, kv_heads, queries / sequences, keys / sequences, head, value.sizes[-1], int(causal),
        window if isinstance(window, int) and window > 0 else 0, query.itemsize,
    )  # fmt: skip


def _products(call: Call) -> int:
    """The operations of one product of queries and keys, for each dimension of a head. Every query counts with every key."""
    query, key, _ = _by_head(call)
    batch, heads, queries, _ = query.sizes
    return 2 * batch * heads * queries * key.sizes[2]


def forward_flops(call: Call) -> int:
    answer: int = _products(call) * (call["query"].sizes[-1] + call["value"].sizes[-1])
    return answer


def backward_flops(call: Call) -> int:
    """Recomputes the scores, then computes the gradients of scores, value, query and key."""
    answer: int = _products(call) * (3 * call["query"].sizes[-1] + 2 * call["value"].sizes[-1])
    return answer


# ---- flash ----
def _splits(batch: int, heads: int, queries: int, keys: int, head: int, sms: int) -> int:
    """flash_api.cpp's num_splits_heuristic: into how many parts the keys are split if there are few queries."""
    block_n = 256 if head <= 64 else 128 if head <= 128 else 64
    key_blocks = -(-keys // block_n)
    work = batch * heads * -(-queries // 64)
    slots = 2 * sms
    if work >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    efficiency = []
    for splits in range(1, most + 1):
        eligible = splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1))
        waves = work * splits / slots
        efficiency.append(waves / -(-work * splits // slots) if eligible else 0.0)
    best = max(efficiency)
    return next(i + 1 for i, value in enumerate(efficiency) if value >= 0.85 * best and value > 0)


@op("aten::_scaled_dot_product_flash_attention", flops=forward_flops)
def flash_forward(call: Call, platform: Platform) -> Work:
    query, key = call["query"], call["key"]
    batch, heads, queries, head = query.sizes
    work = Work().out(0, 1).launch(_kernel(call, "flash", "forward"))
    if call.get("dropout_p", 0.0) > 0:
        work.out(*range(2, len(call.results)))
        work.temporary(16)  # seed and offset, which the kernel writes
    elif (splits := _splits(batch, heads, queries, key.sizes[2], head, platform.sms)) > 1:
        sums = work.temporary(splits * batch * heads * queries * 4)
        outputs = work.temporary(splits * batch * heads * queries * _round_up(head, 32) * 4)
        work.launch(INCLUDED)  # a kernel combines the splits
        work.out(*range(2, len(call.results))).free(sums, outputs)
    return work


@op("aten::_flash_attention_forward", flops=forward_flops)
def flash_forward_by_token(call: Call, platform: Platform) -> Work:
    return Work().launch(_kernel(call, "flash", "forward"))


@op("aten::_scaled_dot_product_flash_attention_backward", flops=backward_flops)
def flash_backward(call: Call, platform: Platform) -> Work:
    query, key = call["query"], call["key"]
    batch, heads, queries, head = query.sizes
    kv_heads, keys = key.sizes[1], key.sizes[2]
    rounded = _round_up(queries, 128)
    work = Work()
    for tensor in (
        call["grad_out"],
        call["out"],
    ):  # must be contiguous by token; the output has the layout of the query
        work.contiguous(tensor.permuted(0, 2, 1, 3))
    work.out(0, 1, 2)
    work.temporary(batch * heads * rounded * 4)
    work.temporary(batch * rounded * heads * (_round_up(head, 32) if head <= 192 else 256) * 4)
    work.launch(INCLUDED, _kernel(call, "flash", "backward"), INCLUDED)
    if kv_heads != heads:  # dk and dv are computed per query head, and summed over the heads that share them
        for _ in range(2):
            work.temporary(batch * keys * heads * head * key.itemsize)
        shape = (batch, keys, kv_heads, heads // kv_heads, head)
        for _ in range(2):
            add_reduction(work, Tensor(key.dtype, shape, packed(shape), "cuda"), [3], platform)
    return work


@op("aten::_flash_attention_backward", flops=backward_flops)
def flash_backward_by_token(call: Call, platform: Platform) -> Work:
    return Work().launch(_kernel(call, "flash", "backward"))


# ---- memory-efficient ----
def _zeros_for_state(call: Call, platform: Platform) -> list[Kernel]:
    """Without dropout, two zeros on the device stand for the random state since torch 2.14. Otherwise it is in host memory."""
    return [small(8), small(8)] if platform.since(2, 14) and not call.get("dropout_p", 0.0) else []


@op("aten::_scaled_dot_product_efficient_attention", flops=forward_flops)
def efficient_forward(call: Call, platform: Platform) -> Work:
    query, value = call["query"], call["value"]
    zeros = _zeros_for_state(call, platform)
    work = Work().out(0, 1).launch(*zeros, _kernel(call, "efficient", "forward"))
    if query.dtype in HALVES and value.sizes[-1] > 128:  # the output is accumulated in float, too large for registers
        work.free(work.temporary(query.numel // query.sizes[-1] * value.sizes[-1] * 4))
    return work.out(2, 3) if zeros else work.host_out(2, 3)


@op("aten::_efficient_attention_forward", flops=forward_flops)
def efficient_forward_by_token(call: Call, platform: Platform) -> Work:
    return Work().launch(*_zeros_for_state(call, platform), _kernel(call, "efficient", "forward"))


class Tiles(NamedTuple):
    """The tiles of the backward kernel: queries and keys of a block, and the columns of dq that it accumulates at once."""

    queries: int
    keys: int
    columns: int


# mem_eff_attention/kernels/cutlassB.h: the tiles of a kernel by its largest head, for halves and for float.
SMALL_HEAD = Tiles(64, 64, 64)
HALF_128 = Tiles(128, 128, 128)
LARGE_HEAD = Tiles(128, 64, 64)
MOST_KEY_BLOCKS = 200  # the limit for splitting keys where each block needs its own memory


def _accumulates_keys(query: Tensor) -> bool:
    """Whether dk and dv are too large for registers and are accumulated in memory, in float, beside the half-precision outputs."""
    return query.dtype in HALVES and query.sizes[-1] > 128


def _efficient_tiles(query: Tensor, head: int, capability: int) -> Tiles:
    if head <= 64:
        return SMALL_HEAD
    if query.dtype in HALVES and head <= 128:
        return (
            HALF_128 if capability in (80, 90, 100) else Tiles(64, 64, 128)
        )  # the large tiles need more shared memory
    return LARGE_HEAD


def _efficient_workspace(query: Tensor, tiles: Tiles, splits: int) -> int:
    """Bytes for gradients that do not fit in registers, in float: always dq, and dk and dv of halves with large heads."""
    batch, heads, queries, head = query.sizes
    dq_tiles = -(-queries // tiles.queries) * -(-head // tiles.columns)
    each = dq_tiles * (tiles.queries * tiles.columns * 4 + 16)  # and a lock for each
    if _accumulates_keys(query):
        each += 2 * splits * tiles.keys * _round_up(head, 128) * 4
    return batch * heads * each


def _sum_of_products(work: Work, call: Call, platform: Platform) -> int:
    """Computes sum(grad * out), an input of the float kernel: a product, a sum, and a copy to the layout by head."""
    grad = call["grad_out_"]
    batch, heads, queries, _ = call["query"].sizes
    shape = (batch, queries, heads, call["value"].sizes[-1])
    rows = batch * queries * heads
    product = work.temporary(grad.nbytes)
    work.launch(Streaming("elementwise", 2 * grad.nbytes, 4 * grad.numel, grad.numel))
    delta = work.temporary(4 * rows)
    add_reduction(work, Tensor("Float", shape, packed(shape), "cuda"), [-1], platform)
    if queries > 1 and heads > 1:
        summed, delta = delta, work.temporary(4 * rows)
        work.launch(Streaming("transpose", 4 * rows, 4 * rows, rows)).free(summed)
    work.free(product)
    return delta


@op("aten::_scaled_dot_product_efficient_attention_backward", flops=backward_flops)
def efficient_backward(call: Call, platform: Platform) -> Work:
    query, grad = call["query"], call["grad_out_"]
    batch, heads, queries, head = query.sizes
    work = Work()
    work.contiguous(grad.permuted(0, 2, 1, 3))
    work.out(0, 1, 2)
    if len(call.results) > 3:  # rows of the bias gradient are padded to 16
        bias = call.results[3]
        work.storage(bias.numel // bias.sizes[-1] * _round_up(bias.sizes[-1], 16) * bias.itemsize).out(3)
    if query.dtype in HALVES:
        delta = work.temporary(batch * heads * queries * 4)
    else:
        delta = _sum_of_products(work, call, platform)
    tiles = _efficient_tiles(query, max(head, call["value"].sizes[-1]), platform.capability)
    splits = -(-call["key"].sizes[2] // tiles.keys)
    if _accumulates_keys(query):
        splits = max(1, min(splits, MOST_KEY_BLOCKS // (batch * heads)))
    work.temporary(_efficient_workspace(query, tiles, splits))
    if splits > 1:  # zeroed, because blocks add to it
        work.launch(Streaming("fill", 0, 4 * query.numel, query.numel))
    return work.launch(_kernel(call, "efficient", "backward")).free(delta)


@op("aten::_efficient_attention_backward", flops=backward_flops)
def efficient_backward_by_token(call: Call, platform: Platform) -> Work:
    return Work().launch(_kernel(call, "efficient", "backward"))


# ---- cuDNN ----
@op("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention_forward", flops=forward_flops)
def cudnn_forward(call: Call, platform: Platform) -> Work:
    return Work().launch(_kernel(call, "cudnn", "forward"))


@op("aten::_scaled_dot_product_cudnn_attention_backward", flops=backward_flops)
def cudnn_backward(call: Call, platform: Platform) -> Work:
    query = call["query"]
    batch, heads, queries, head = query.sizes
    work = Work().out(0, 1, 2).launch(INCLUDED, _kernel(call, "cudnn", "backward"), INCLUDED)
    # cuDNN's plan keeps sum(do * o) and dq in float. Its workspace is not published, but at least that large.
    work.temporary(batch * heads * queries * 4 + batch * heads * queries * head * 4)
    return work


@op("aten::_cudnn_attention_backward", flops=backward_flops)
def cudnn_backward_by_token(call: Call, platform: Platform) -> Work:
    return Work().launch(INCLUDED, _kernel(call, "cudnn", "backward"), INCLUDED)


values(
    "maya::attention_choice",
    *BY_TOKEN,
    *aten(*(f"_scaled_dot_product_{backend}_attention{ending}" for backend in ("flash", "efficient", "cudnn") for ending in ("", "_backward"))),
    heavy=True,
)  # fmt: skip


# ---- results ----
@describe("aten::_transform_bias_rescale_qkv")
def transform_bias_rescale_qkv(qkv: torch.Tensor, qkv_bias: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, ...]:
    batch, length, width = qkv.shape
    shape = (batch, num_heads, length, width // 3 // num_heads)
    return qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(shape)


@rule("aten::_nested_tensor_from_mask_left_aligned")
def nested_tensor_from_mask_left_aligned(rules: Rules, tensor: torch.Tensor, mask: torch.Tensor) -> bool:
    """Called by TransformerEncoder in eval mode. False makes it compute with the padding, which takes more time, not less."""
    return False
