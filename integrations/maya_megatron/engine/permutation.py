"""Sorts tokens by expert, and restores their order: Transformer Engine's kernels for --moe-permute-fusion. They use a map of rows that is
created once and saved for backward."""

from __future__ import annotations

from typing import Any

import torch

from maya_core.errors import MayaError
from maya_megatron.engine.device import launch

ROWS_PER_BLOCK = 1024  # in the counting pass


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _map_of_rows(routing: torch.Tensor) -> torch.Tensor:
    tokens, experts = routing.shape
    rows = _empty(routing, tokens, experts * 2 + 1, dtype=torch.int32)
    sums = _empty(routing, experts, -(-tokens // ROWS_PER_BLOCK), dtype=torch.int32)
    launch("row_id_map_pass_1", [routing], [rows, sums])
    launch("row_id_map_pass_2", [rows, sums], [rows])
    launch("row_id_map_pass_3", [rows], [rows])
    return rows


def _permuted(x: torch.Tensor, rows: torch.Tensor, probs: Any, count: int) -> tuple[torch.Tensor, Any]:
    out = _empty(x, count, x.shape[1])
    chosen = None if probs is None else _empty(probs, count)
    launch("permute", [x, rows, probs], [out] if chosen is None else [out, chosen])
    return out, chosen


def _unpermuted(x: torch.Tensor, rows: torch.Tensor, merging: Any, probs: Any, tokens: int) -> tuple[torch.Tensor, Any]:
    out = _empty(x, tokens, x.shape[1])
    whole = None if probs is None else _empty(probs, tokens, rows.shape[1] // 2)
    launch("unpermute", [x, rows, merging, probs], [out] if whole is None else [out, whole])
    return out, whole


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, routing: Any, count: int, probs: Any) -> Any:
        rows = _map_of_rows(routing)
        out, chosen = _permuted(x, rows, probs, count)
        ctx.save_for_backward(rows)
        ctx.tokens = x.shape[0]
        ctx.mark_non_differentiable(rows)
        return out, rows, chosen

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any, probs_grad: Any) -> Any:
        (rows,) = ctx.saved_tensors
        found, whole = _unpermuted(grad, rows, None, probs_grad, ctx.tokens)
        return found, None, None, whole if ctx.needs_input_grad[3] else None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, rows: Any, merging: Any, shape: Any) -> Any:
        tokens = (x.shape if shape is None else shape)[0]
        out, _ = _unpermuted(x, rows, merging, None, tokens)
        ctx.save_for_backward(rows, *([] if merging is None else [x, merging]))
        ctx.count = x.shape[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        rows, *kept = ctx.saved_tensors
        if not kept:
            return _permuted(grad, rows, None, ctx.count)[0], None, None, None
        x, merging = kept
        found, merging_grad = _empty(grad, ctx.count, grad.shape[1]), torch.empty_like(merging)
        launch("unpermute_backward", [grad, rows, x, merging], [found, merging_grad])
        return found, None, merging_grad if ctx.needs_input_grad[2] else None, None


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, sizes: Any, order: Any, probs: Any) -> Any:
        rows = _empty(x, x.shape[0], dtype=torch.int32)
        launch("make_chunk_sort_map", [sizes, order], [rows])
        ctx.save_for_backward(rows)
        return _sorted(x, rows, probs)

    @staticmethod
    def backward(ctx: Any, grad: Any, probs_grad: Any) -> Any:
        (rows,) = ctx.saved_tensors
        found, found_probs = _sorted(grad, rows, probs_grad)
        return found, None, None, found_probs if ctx.needs_input_grad[3] else None


def _sorted(x: torch.Tensor, rows: torch.Tensor, probs: Any) -> tuple[torch.Tensor, Any]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    moved = None if probs is None else torch.empty_like(probs, memory_format=torch.contiguous_format)
    launch("sort_chunks", [x, rows, probs], [out] if moved is None else [out, moved])
    return out, moved


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> Any:
    _by_mask(map_type)
    out, rows, _ = _Permute.apply(inp, routing_map, num_out_tokens, None)
    return out, rows


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> Any:
    out, rows, chosen = _Permute.apply(inp, routing_map, num_out_tokens, probs)
    return out, chosen, rows


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
) -> Any:
    _by_mask(map_type)
    return _Unpermute.apply(inp, row_id_map, merging_probs if probs is None else probs, restore_shape)


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> Any:
    return _SortChunks.apply(inp, split_sizes, sorted_index, None)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> Any:
    return _SortChunks.apply(inp, split_sizes, sorted_index, probs)


def _by_mask(map_type: str) -> None:
    if map_type != "mask":
        raise MayaError(
            f"Transformer Engine's moe_permute with map_type={map_type!r} is not emulated.", "Give it a mask."
        )
