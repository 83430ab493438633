"""A stand-in for attn_implementation="flash_attention_2" (and 3), because the flash_attn package needs a GPU to be built. PyTorch
contains the same kernels, and their time and memory are known.

The package processes packed sequences in a single launch, and no dense launch has their shape. The stand-in assumes equal sequences
with the same amount of work: n of them, where T tokens in sequences of lengths l have T*T/n = sum(l*l). A sliding window is assumed to
be full attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration
from maya_core.ops.attention_choice import FLASH, only
from maya_huggingface import flash_attention_imported

aten = torch.ops.aten
UTILITIES = "transformers.modeling_flash_attention_utils"
VERSIONS = (2, 3)  # their speed is set with `maya run --attention`
LOADED = (  # names that transformers sets for the flash attention that is used first
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
    "_is_fa3",
    "_flash_supports_window",
)


def install(integration: Integration) -> None:
    patches = integration.patches
    patches.when_imported(UTILITIES, functools.partial(_stand_in, integration))

    def models(module: ModuleType) -> None:
        kind = module.PreTrainedModel
        if not hasattr(
            kind, "_flash_attn_import_error"
        ):  # before transformers 5.4, a check of its own for each version
            for version in VERSIONS:
                if hasattr(module, f"is_flash_attn_{version}_available"):  # 3 is supported since transformers 4.53
                    patches.set(module, f"is_flash_attn_{version}_available", lambda: True)
            return
        check = kind._flash_attn_import_error

        @functools.wraps(check)
        def import_error(self: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("flash_attn_version") not in VERSIONS:
                check(self, *args, **kwargs)

        patches.set(kind, "_flash_attn_import_error", import_error)

    patches.when_imported("transformers.modeling_utils", models)


def _stand_in(integration: Integration, utilities: ModuleType) -> None:
    if not hasattr(utilities, "_lazy_imports"):  # before transformers 4.54, the functions are imported with the module
        flash_attention_imported.stand_in(integration, utilities, _replacement)
        return
    patches, original, names = integration.patches, utilities._lazy_imports, vars(utilities)
    for name in LOADED:  # each version has some of them; 4.54 creates them on first use
        patches.keep(names, name)
        if name in names:
            names[name] = None
    if hasattr(utilities, "FLASH_ATTENTION_COMPATIBILITY_MATRIX"):  # since transformers 5.4
        for version in VERSIONS:
            check = utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]
            patches.put(check, "general_availability_check", lambda: True)

    @functools.wraps(original)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in [f"flash_attention_{version}" for version in VERSIONS]:
            return original(implementation, *args, **kwargs)
        dense, varlen = _replacement(integration, implementation)
        if not hasattr(utilities, "_pad_input"):  # transformers 4.54
            return dense, varlen, utilities._fa3_pad_input, utilities._fa3_unpad_input, implementation[-1] == "3"
        padding = (utilities._pad_input, utilities._unpad_input)
        if not hasattr(utilities, "_flash_with_kvcache_fn"):  # before transformers 5.4
            return dense, varlen, *padding
        return dense, varlen, None, *padding

    patches.set(utilities, "_lazy_imports", lazy_imports)


def _replacement(integration: Integration, implementation: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions of the package for batches and for packed sequences, and a line for the user."""
    integration.skip(f"{implementation} is replaced by PyTorch's own flash attention, which has the same kernels")
    varlen = functools.partial(flash_attn_varlen_func, integration.host_value)
    return flash_attn_func, functools.wraps(flash_attn_varlen_func)(varlen)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of tensors of shape (batch, tokens, heads, head)."""
    heads_first = (one.transpose(1, 2) for one in (q, k, v))
    with only(FLASH):
        found = aten._scaled_dot_product_flash_attention(*heads_first, dropout_p, causal, False, scale=softmax_scale)
    out: torch.Tensor = found[0].transpose(1, 2)
    return out


def flash_attn_varlen_func(
    value_of: Callable[[torch.Tensor], torch.Tensor | None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of packed sequences, of shape (tokens, heads, head)."""
    ends = value_of(cu_seqlens_q) if cu_seqlens_q.is_cuda else cu_seqlens_q
    out: torch.Tensor = _Varlen.apply(q, k, v, equal_sequences(cu_seqlens_q, ends), dropout_p, causal, softmax_scale)
    return out


def equal_sequences(cu_seqlens: torch.Tensor, ends: torch.Tensor | None) -> int:
    """The number of sequences of equal length with the same amount of work. Unknown lengths are assumed to be equal."""
    if ends is None:
        return max(1, cu_seqlens.numel() - 1)
    lengths = ends.diff().double()
    work = float((lengths * lengths).sum())
    return max(1, round(float(lengths.sum()) ** 2 / work)) if work else 1


class _Varlen(torch.autograd.Function):
    """Attention of `count` equal parts, which overlap a little if the tokens cannot be divided evenly."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int, *how: Any) -> torch.Tensor:
        dropout, causal, scale = how
        inputs = [_parts(one, count) for one in (q, k, v)]
        with only(FLASH):
            found = aten._scaled_dot_product_flash_attention(*inputs, dropout, causal, False, scale=scale)
        ctx.save_for_backward(q, k, v, *(found[index] for index in (0, 1, 6, 7)))
        ctx.lengths, ctx.count, ctx.how = found[4:6], count, how
        return _packed(found[0], len(q))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, sums, seed, offset = ctx.saved_tensors
        dropout, causal, scale = ctx.how
        inputs = [_parts(one, ctx.count) for one in (grad, q, k, v)]
        grads = aten._scaled_dot_product_flash_attention_backward(
            *inputs, out, sums, None, None, *ctx.lengths, dropout, causal, seed, offset, scale=scale
        )
        return *(_packed(one, len(q)) for one in grads), None, None, None, None


def _parts(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """(tokens, heads, head) as (count, heads, tokens of a part, head), without a copy."""
    total, heads, head = tokens.shape
    count = min(count, total)
    length = -(-total // count)
    apart = (total - length) // (count - 1) if count > 1 else length
    token, *inner = tokens.stride()
    return tokens.as_strided((count, heads, length, head), (apart * token, inner[0], token, inner[1]))


def _packed(parts: torch.Tensor, total: int) -> torch.Tensor:
    return parts.transpose(1, 2).flatten(0, 1)[:total]
