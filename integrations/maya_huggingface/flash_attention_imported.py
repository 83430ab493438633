"""The stand-in for flash attention in transformers 4.50 to 4.53, which import the package's functions together with a module of theirs, if
the package is installed. Later versions look for them when a model first needs them (flash_attention.py)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration

Replacement = Callable[[Integration, str], tuple[Callable[..., Any], Callable[..., Any]]]


def stand_in(integration: Integration, utilities: ModuleType, replacement: Replacement) -> None:
    names: dict[str, Any] = {"_flash_supports_window_size": True}
    if hasattr(utilities, "flash_attn_2_func"):  # transformers 4.53, which also knows flash_attention_3
        for version in (2, 3):
            dense, varlen = _on_use(integration, f"flash_attention_{version}", replacement)
            names[f"flash_attn_{version}_func"] = dense
            names[f"flash_attn_{version}_varlen_func"] = varlen
            names[f"pad_input_fa{version}"] = utilities._fa3_pad_input
            names[f"unpad_input_fa{version}"] = utilities._fa3_unpad_input
    else:
        dense, varlen = _on_use(integration, "flash_attention_2", replacement)
        names |= {"flash_attn_func": dense, "flash_attn_varlen_func": varlen}
        # Its unpad_input is only needed to generate text.
        names |= {"index_first_axis": index_first_axis, "pad_input": pad_input}
    for name, value in names.items():
        integration.patches.add(utilities, name, value)


def _on_use(integration: Integration, implementation: str, replacement: Replacement) -> list[Callable[..., Any]]:
    """The functions of the package. The user is told when one of them is called."""

    def function(index: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(integration, implementation)[index](*args, **kwargs)

        return call

    return [function(0), function(1)]


def index_first_axis(tokens: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The tokens that are not padding."""
    return tokens[indices]


def pad_input(tokens: torch.Tensor, indices: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """The inverse: (tokens, ...) as (batch, length, ...), with zeros as padding."""
    padded = tokens.new_zeros(batch * length, *tokens.shape[1:])
    padded[indices] = tokens
    return padded.view(batch, length, *tokens.shape[1:])
