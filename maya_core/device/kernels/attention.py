"""Attention kernels: flash, memory-efficient and cuDNN, with the buffers their backward passes need.

Follows ATen/native/transformers/cuda: flash_attn/flash_api.cpp, attention_backward.cu, mem_eff_attention.
"""

from __future__ import annotations

from typing import NamedTuple

from maya_core.device.kernels.call import HALVES, Call, Tensor, Work, kernel
from maya_core.device.kernels.reductions import add_input_copy, add_reduction


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _splits(batch: int, heads: int, queries: int, keys: int, head: int, sms: int) -> int:
    """flash_api.cpp's num_splits_heuristic: how many ways few queries share many keys."""
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


@kernel("_scaled_dot_product_flash_attention", "_flash_attention_forward")
def flash_forward(call: Call) -> Work:
    query, key = call["query"], call["key"]
    if len(query.sizes) != 4 or call.name == "_flash_attention_forward":
        return Work()
    batch, heads, queries, head = query.sizes
    keys = key.sizes[2]
    work = Work().out(0, 1)
    if call.get("dropout_p", 0.0) > 0:
        work.out(*range(2, len(call.results)))
        work.temporary(16)  # seed and offset as the kernel wrote them
    elif (splits := _splits(batch, heads, queries, keys, head, call.sms)) > 1:
        sums = work.temporary(splits * batch * heads * queries * 4)
        outputs = work.temporary(splits * batch * heads * queries * _round_up(head, 32) * 4)
        work.launches += 1  # and a kernel to combine the splits
        work.out(*range(2, len(call.results))).free(sums, outputs)
    return work


@kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(call: Call) -> Work:
    query, key = call["query"], call["key"]
    batch, heads, queries, head = query.sizes
    kv_heads, keys = key.sizes[1], key.sizes[2]
    rounded = _round_up(queries, 128)
    work = Work(launches=3)
    for tensor in (call["grad_out"], call["out"]):  # wanted contiguous by token; the output lies as the query did
        add_input_copy(work, tensor.permuted(0, 2, 1, 3))
    work.out(0, 1, 2)
    work.temporary(batch * heads * rounded * 4)
    work.temporary(batch * rounded * heads * (_round_up(head, 32) if head <= 192 else 256) * 4)
    if kv_heads != heads:  # dk and dv per query head, summed over the heads that share them
        for _ in range(2):
            work.temporary(batch * keys * heads * head * key.itemsize)
        expanded = Tensor(
            key.dtype,
            (batch, keys, kv_heads, heads // kv_heads, head),
            (keys * heads * head, heads * head, heads // kv_heads * head, head, 1),
            "cuda",
        )
        for _ in range(2):
            add_reduction(work, expanded, [3], call)
    return work


@kernel("_scaled_dot_product_efficient_attention")
def efficient_forward(call: Call) -> Work:
    query, value = call["query"], call["value"]
    work = Work().out(0, 1)
    if query.dtype in HALVES and value.sizes[-1] > 128:  # the output is accumulated in float, too large for registers
        work.free(work.temporary(query.numel // query.sizes[-1] * value.sizes[-1] * 4))
    return work.host_out(2, 3)  # the random state is the host's


class Tiles(NamedTuple):
    """How the backward kernel cuts a problem: queries and keys of a block, columns of dq it accumulates at once."""

    queries: int
    keys: int
    columns: int


# mem_eff_attention/kernels/cutlassB.h: a kernel's tiles by the heads it takes, for halves and for float
SMALL_HEAD = Tiles(64, 64, 64)
HALF_128 = Tiles(128, 128, 128)
LARGE_HEAD = Tiles(128, 64, 64)
MOST_KEY_BLOCKS = 200  # where each block needs memory of its own, keys are not split over more than this many


def _accumulates_keys(query: Tensor) -> bool:
    """Whether dk and dv, too large for registers, are accumulated in memory: in float, beside outputs of half the size."""
    return query.dtype in HALVES and query.sizes[-1] > 128


def _efficient_tiles(query: Tensor, head: int, capability: int) -> Tiles:
    if head <= 64:
        return SMALL_HEAD
    if query.dtype in HALVES and head <= 128:
        return HALF_128 if capability in (80, 90, 100) else Tiles(64, 64, 128)  # the large one wants more shared memory
    return LARGE_HEAD


def _efficient_workspace(query: Tensor, tiles: Tiles, splits: int) -> int:
    """Gradients that do not fit in registers: dq always, dk and dv of halves with large heads, in float."""
    batch, heads, queries, head = query.sizes
    dq_tiles = -(-queries // tiles.queries) * -(-head // tiles.columns)
    each = dq_tiles * (tiles.queries * tiles.columns * 4 + 16)  # and a lock for each
    if _accumulates_keys(query):
        each += 2 * splits * tiles.keys * _round_up(head, 128) * 4
    return batch * heads * each


@kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(call: Call) -> Work:
    query, grad = call["query"], call["grad_out_"]
    batch, heads, queries, head = query.sizes
    value_head = call["value"].sizes[-1]
    work = add_input_copy(Work(launches=1), grad.permuted(0, 2, 1, 3))
    work.out(0, 1, 2)
    if len(call.results) > 3:  # the bias gradient has its rows padded to 16
        bias = call.results[3]
        work.storage(bias.numel // bias.sizes[-1] * _round_up(bias.sizes[-1], 16) * bias.itemsize).out(3)
    delta_bytes = batch * heads * queries * 4
    if query.dtype in HALVES:
        delta = work.temporary(delta_bytes)
    else:  # the float kernel is given sum(grad * out), computed beside it
        product = work.temporary(grad.nbytes)
        work.launches += 1
        delta = work.temporary(delta_bytes)
        by_token = Tensor(
            "Float",
            (batch, queries, heads, value_head),
            (queries * heads * value_head, heads * value_head, value_head, 1),
            "cuda",
        )
        add_reduction(work, by_token, [-1], call)
        if queries > 1 and heads > 1:  # turned to lie by head
            summed, delta = delta, work.temporary(delta_bytes)
            work.launches += 1
            work.free(summed)
        work.free(product)
    tiles = _efficient_tiles(query, max(head, value_head), call.capability)
    splits = -(-call["key"].sizes[2] // tiles.keys)
    if _accumulates_keys(query):
        splits = max(1, min(splits, MOST_KEY_BLOCKS // (batch * heads)))
    work.temporary(_efficient_workspace(query, tiles, splits))
    work.launches += int(splits > 1)  # zeroed, as blocks add to it
    return work.free(delta)


@kernel("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(call: Call) -> Work:
    query = call["query"]
    batch, heads, queries, head = query.sizes
    work = Work(launches=3).out(0, 1, 2)
    # cuDNN's plan keeps sum(do * o) and dq in float; its own workspace, not published, is at least that
    work.temporary(batch * heads * queries * 4 + batch * heads * queries * head * 4)
    return work
