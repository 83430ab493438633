"""Factorizations of linalg that have no Meta kernel. Matrices come out column by column, as LAPACK and cuSOLVER write them."""

from __future__ import annotations

import torch

from maya_core.device.rules.book import describe


def _by_columns(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((*shape[:-2], shape[-1], shape[-2])).mT


def _set_by_columns(out: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`out` of that shape; one that came empty takes the layout of the factorization too."""
    if out.numel() == 0 or out.shape == shape:
        out.resize_((*shape[:-2], shape[-1], shape[-2]))
        strides = list(out.stride())
        strides[-1], strides[-2] = strides[-2], strides[-1]
        return out.as_strided_(shape, strides)
    return out.resize_(shape)


@describe("aten::geqrf")
def geqrf(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _by_columns(tuple(self.shape), self), self.new_empty((*self.shape[:-2], min(self.shape[-2:])))


@describe("aten::geqrf.a")
def geqrf_out(self: torch.Tensor, *, a: torch.Tensor, tau: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _set_by_columns(a, tuple(self.shape)), tau.resize_((*self.shape[:-2], min(self.shape[-2:])))


@describe("aten::linalg_lstsq.out")
def linalg_lstsq_out(
    self: torch.Tensor,
    b: torch.Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    solution: torch.Tensor,
    residuals: torch.Tensor,
    rank: torch.Tensor,
    singular_values: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """CUDA has the driver 'gels' only: it assumes full rank and finds neither rank nor singular values."""
    if driver not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    rows, columns = self.shape[-2:]
    vector = self.dim() - 1 == b.dim() and b.shape == self.shape[:-1]
    sides = 1 if vector else b.size(-1)
    batch = torch.broadcast_shapes(self.shape[:-2], b.shape[:-1] if vector else b.shape[:-2])
    if vector:
        solution.resize_((*batch, columns))
    else:
        _set_by_columns(solution, (*batch, columns, sides))
    residuals.resize_((*batch, sides) if rows > columns else 0)
    return solution, residuals, rank.resize_(0), singular_values.resize_(0)
