"""DotProductAttention. The backend is chosen as in Transformer Engine, by the variables that Megatron's --attention-backend sets. For
flash attention, PyTorch's copy of the package's kernels is used."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from maya_core.errors import MayaError
from maya_core.ops.attention_choice import FLASH, only
from maya_megatron.engine.device import launch
from maya_megatron.engine.softmax import scaled_masked_softmax

aten = torch.ops.aten


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        window_size: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if softmax_type != "vanilla" or return_max_logit:
            raise MayaError(
                "softmax_type and return_max_logit of Transformer Engine's attention are not emulated.",
                "Leave --softmax-type, --qk-clip and --log-max-attention-logit out.",
            )
        head = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head)
        self.qkv_format, self.attn_mask_type, self.attention_type = qkv_format, attn_mask_type, attention_type
        self.dropout = attention_dropout
        self.draw = nullcontext if get_rng_state_tracker is None else lambda: get_rng_state_tracker().fork()
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def set_context_parallel_group(self, cp_group: Any, ranks: Any, stream: Any, cp_comm_type: str = "p2p") -> None:
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        core_attention_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        kind = attn_mask_type or self.attn_mask_type
        layout = qkv_format or self.qkv_format
        if layout == "thd":
            raise MayaError("packed sequences (thd) are not emulated in Transformer Engine's attention.", "Pad them.")
        if layout == "bshd":
            query, key, value = (one.transpose(0, 1) for one in (query, key, value))
        if not _layout_known(query, key, value):
            query, key, value = (one.contiguous() for one in (query, key, value))
        cp_size = dist.get_world_size(self.cp_group) if isinstance(self.cp_group, dist.ProcessGroup) else 1
        dropout = self.dropout if self.training else 0.0
        backend = backend_of(query, value, core_attention_bias)
        if cp_size > 1:
            out = _around_ring(query, key, value, self.cp_group, cp_size, "causal" in kind, self.softmax_scale)
        elif backend == "unfused":
            out = self._unfused(query, key, value, attention_mask, kind, core_attention_bias, dropout)
        else:
            out = _flash(query, key, value, "causal" in kind, dropout, self.softmax_scale, copies=backend == "flash")
        return out.transpose(0, 1).contiguous() if layout == "bshd" else out

    def _unfused(
        self, query: Any, key: Any, value: Any, mask: Any, kind: str, bias: torch.Tensor | None, dropout: float
    ) -> torch.Tensor:
        """UnfusedDotProductAttention.forward, for tensors of shape (tokens, batch, heads, head)."""
        queries, batch, heads, _ = query.shape
        keys = key.shape[0]
        if "padding" in kind and mask is not None:
            ours, theirs = mask if isinstance(mask, tuple) else (mask, mask)
            if theirs.shape[-2] == 1:
                mask = torch.logical_or(ours.squeeze(1).unsqueeze(3), theirs)
        if key.shape[2] != heads:
            key, value = (one.repeat_interleave(heads // one.shape[2], dim=2) for one in (key, value))
        query, key = (one.reshape(one.shape[0], batch * heads, -1) for one in (query, key))
        into = torch.empty(batch * heads, queries, keys, dtype=query.dtype, device=query.device)
        scores = torch.baddbmm(
            into, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=self.softmax_scale
        ).view(batch, heads, queries, keys)
        del into
        if bias is not None:
            scores = (scores + bias).to(query.dtype)
        probs = scaled_masked_softmax(scores, mask if isinstance(mask, torch.Tensor) else None, kind)
        del scores
        if "padding" in kind and isinstance(mask, torch.Tensor):
            probs = probs.masked_fill(mask, 0)
        with self.draw():
            probs = torch.nn.functional.dropout(probs, dropout)
        width = value.shape[-1]
        value = value.reshape(keys, batch * heads, -1)
        out = torch.bmm(probs.view(batch * heads, queries, -1), value.transpose(0, 1))
        return out.view(batch, heads, queries, width).permute(2, 0, 1, 3).contiguous().view(queries, batch, -1)


def _layout_known(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """get_qkv_layout: whether the kernels support the memory layout of the three tensors. Otherwise they are copied, and the tensor
    that they were parts of can be freed."""

    def together(*tensors: torch.Tensor) -> bool:
        return len({one.untyped_storage().data_ptr() for one in tensors}) == 1

    def steps(one: torch.Tensor) -> list[float]:
        return [stride / one.shape[-1] for stride in one.stride()[:-1]]

    def one_after_another(*tensors: torch.Tensor) -> list[int]:
        return [sum(one.numel() for one in tensors[:number]) for number in range(len(tensors))]

    offsets = [one.storage_offset() for one in (query, key, value)]
    heads, width = query.shape[-2:]
    whole = together(query, key, value)
    alike = query.shape == key.shape == value.shape and query.stride() == key.stride() == value.stride()
    if whole and alike and offsets in ([0, heads * width, 2 * heads * width], [0, width, 2 * width]):  # 3hd, h3d
        return True
    if key.shape[:-1] != value.shape[:-1] or steps(key) != steps(value):
        return False
    start = query.numel() if whole else 0
    heads, width = key.shape[-2:]
    if together(key, value) and offsets[1:] in ([start, start + heads * width], [start, start + width]):  # 2hd, h2d
        return True
    apart = [
        (offsets, one_after_another(query, key, value) if whole else [0, 0, 0]),
        (offsets[:2], one_after_another(query, key) if together(query, key) and not whole else [0, 0]),
        (offsets[1:], one_after_another(key, value) if together(key, value) and not whole else [0, 0]),
    ]
    return any(found == wanted for found, wanted in apart)


def backend_of(query: torch.Tensor, value: torch.Tensor, bias: Any) -> str:
    """The order of preference: up to sm80 flash attention, cuDNN, unfused; from sm90 on, cuDNN comes first."""
    flash, fused = (os.getenv(f"NVTE_{name}_ATTN", "1") != "0" for name in ("FLASH", "FUSED"))
    heads = (query.shape[-1], value.shape[-1])
    fits = query.dtype in (torch.float16, torch.bfloat16) and max(heads) <= 256 and not any(one % 8 for one in heads)
    flash = flash and fits and bias is None and heads[0] == heads[1]
    fused = fused and fits
    generation = torch.cuda.get_device_capability()[0]
    if os.getenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0" and generation != 9:
        fused = False  # its backward is only deterministic on Hopper
    if flash and fused and generation >= 9:
        flash = False
    return "flash" if flash else "fused" if fused else "unfused"


def _flash(query: Any, key: Any, value: Any, causal: bool, dropout: float, scale: float, copies: bool) -> torch.Tensor:
    """Attention of tensors of shape (tokens, batch, heads, head). The package needs the batch first and gets copies; cuDNN accepts both."""
    if copies:
        query, key, value = (one.transpose(0, 1).contiguous().transpose(0, 1) for one in (query, key, value))
    with only(FLASH):
        found = aten._scaled_dot_product_flash_attention(
            *(one.permute(1, 2, 0, 3) for one in (query, key, value)), dropout, causal, False, scale=scale
        )
    out = found[0].permute(2, 0, 1, 3)
    return out.reshape(*out.shape[:2], -1).contiguous()


class _Ring(torch.autograd.Function):
    """Context parallelism (p2p): keys and values are sent around, and each rank attends to every part of them in turn.

    With causal attention a rank has two chunks, one from each end, and does half the work of a full block for every part except its
    own. (Here: all queries and half of the keys. For later ranks it is the other way round, which is the same amount of work.)
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, group: Any, size: int, causal: bool, scale: float) -> Any:
        query = query.transpose(0, 1).contiguous()
        parts = [torch.stack([one.transpose(0, 1).contiguous() for one in (key, value)])]
        out: Any = None
        for step in range(size):
            works = []
            if step < size - 1:
                parts.append(torch.empty_like(parts[0]))
                works = _pass_on(parts[step], parts[step + 1], group)
            with only(FLASH):
                found = aten._scaled_dot_product_flash_attention(
                    *_block(query, parts[step], causal and step > 0), 0.0, causal and not step, False, scale=scale
                )
            if out is None:
                out, sums, ctx.lengths, seeds = found[0], found[1], found[4:6], found[6:8]
            else:
                launch("ring_attention_correction", [out, found[0], sums, found[1]], [out, sums])
            for work in works:
                work.wait()
        ctx.save_for_backward(query, parts[-1], out, sums, *seeds)
        ctx.how = (group, size, causal, scale)
        return out.permute(2, 0, 1, 3).reshape(query.shape[1], query.shape[0], -1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, here, out, sums, *seeds = ctx.saved_tensors
        group, size, causal, scale = ctx.how
        batch, tokens, heads, _ = query.shape
        grad = grad.view(tokens, batch, heads, -1).permute(1, 2, 0, 3).contiguous()
        dquery = torch.empty_like(query)
        # Keys and values, and their gradients, are sent around together.
        mine = torch.empty(2, *here.shape, dtype=here.dtype, device=here.device)
        theirs = torch.empty_like(mine)
        for step in range(size):
            works = _pass_on(mine, theirs, group)
            half = causal and step < size - 1
            found = aten._scaled_dot_product_flash_attention_backward(
                grad, *_block(query, here, half), out, sums, None, None, *ctx.lengths, 0.0, causal and not half, *seeds,
                scale=scale,
            )  # fmt: skip
            launch("ring_attention_sum", list(found), [dquery, mine[1]])
            for work in works:
                work.wait()
            mine, theirs = theirs, mine
        dkey, dvalue = mine[1].transpose(1, 2).unbind(0)
        return dquery.transpose(0, 1), dkey, dvalue, None, None, None, None


def _around_ring(query: Any, key: Any, value: Any, group: Any, size: int, causal: bool, scale: float) -> torch.Tensor:
    if key.shape != value.shape:
        raise MayaError(
            "context parallelism with heads of keys and values that differ in size (MLA) is not emulated.",
            "Set --context-parallel-size 1.",
        )
    out: torch.Tensor = _Ring.apply(query, key, value, group, size, causal, scale)
    return out


def _pass_on(mine: torch.Tensor, theirs: torch.Tensor, group: Any) -> list[Any]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, to, group), dist.P2POp(dist.irecv, theirs, source, group)]
    )


def _block(query: torch.Tensor, pair: torch.Tensor, half: bool) -> list[torch.Tensor]:
    """Puts heads before tokens, and returns half of the keys if requested."""
    key, value = (one[:, : one.shape[1] // 2] if half else one for one in pair.unbind(0))
    return [one.transpose(1, 2) for one in (query, key, value)]


class _Rotary(torch.autograd.Function):
    """fused_rope: one kernel in forward, one in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        launch("fused_rope_forward", [x, freqs], [out])
        ctx.save_for_backward(freqs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        launch("fused_rope_backward", [grad, *ctx.saved_tensors], [out])
        return out, None


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    out: torch.Tensor = _Rotary.apply(t, freqs)
    return out
