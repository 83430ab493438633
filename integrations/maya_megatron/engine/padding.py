"""Pads the tokens of each expert to the multiple that FP8 products need, and removes the padding."""

from __future__ import annotations

from typing import Any

import torch

from maya_megatron.engine.device import launch

ALIGNED = 16  # rows


class _Rows(torch.autograd.Function):
    """Copies the rows of each expert to their place in another layout."""

    @staticmethod
    def forward(ctx: Any, name: str, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.name, ctx.rows = name, x.shape[0]
        out = torch.empty(rows, *x.shape[1:], dtype=x.dtype, device=x.device)
        launch(name, [x], [out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        out = torch.empty(ctx.rows, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
        launch(OTHER[ctx.name], [grad], [out])
        return None, out, None


OTHER = {"multi_row_padding": "multi_row_unpadding", "multi_row_unpadding": "multi_row_padding"}


def padded(splits: list[int], aligned: int) -> list[int]:
    return [-(-rows // aligned) * aligned for rows in splits]


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = align_size or ALIGNED

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        wanted = padded(m_splits, self.align_size)
        if wanted == list(m_splits):
            return inp, m_splits
        return _Rows.apply("multi_row_padding", inp.reshape(-1, inp.shape[-1]), sum(wanted)), wanted


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> Any:
        if padded(m_splits, self.align_size) == list(m_splits):
            return inp
        return _Rows.apply("multi_row_unpadding", inp.reshape(-1, inp.shape[-1]), sum(m_splits))
