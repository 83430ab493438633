"""Solvers, factorizations and transforms of cuSOLVER, cuFFT and others, which were not measured. They are bound by arithmetic or latency, not
by bytes, so their durations are lower bounds, and predictions name them. Resulting matrices are column-major, as LAPACK and cuSOLVER write them.
"""

from __future__ import annotations

from maya_core.hardware.platform import Platform
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.unknown import unknown
from maya_core.ops.work import Work
from maya_core.trace.call import Call

LINALG = aten(
    "_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "linalg_cholesky_ex",
    "linalg_eig", "linalg_eigvals", "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve",
    "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp", "linalg_qr",
    "linalg_solve_triangular", "_fft_c2c", "_fft_c2r", "_fft_r2c",
)  # fmt: skip
SOLVERS = aten(
    "_cholesky_solve_helper", "cholesky", "cholesky_inverse", "geqrf", "ormqr", "lu_unpack", "triangular_solve", "_cdist_forward",
    "_cdist_backward", "_pdist_forward", "_pdist_backward", "mode", "kthvalue", "median", "nanmedian", "renorm", "renorm_",
    "_compute_linear_combination",
)  # fmt: skip


@op(*LINALG, *SOLVERS)
def solver(call: Call, platform: Platform) -> Work:
    return unknown(call)


values(*LINALG, heavy=True)


# ---- results ----
def _by_columns(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((*shape[:-2], shape[-1], shape[-2])).mT


def _set_by_columns(out: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Resizes `out` to this shape; an empty one also gets the layout of the factorization."""
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
    """CUDA has only the driver 'gels', which assumes full rank and computes neither rank nor singular values."""
    if driver not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    rows, columns = self.shape[-2:]
    vector = self.dim() - 1 == b.dim() and b.shape == self.shape[:-1]
    sides = 1 if vector else b.size(-1)
    batch = torch.broadcast_shapes(self.shape[:-2], b.shape[:-1] if vector else b.shape[:-2])  # type: ignore[no-untyped-call]
    if vector:
        solution.resize_((*batch, columns))
    else:
        _set_by_columns(solution, (*batch, columns, sides))
    residuals.resize_((*batch, sides) if rows > columns else 0)
    return solution, residuals, rank.resize_(0), singular_values.resize_(0)


@describe("aten::_compute_linear_combination")
def compute_linear_combination(input: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    return input.new_empty((coefficients.size(0), *input.shape[1:]))


@describe("aten::_compute_linear_combination.out")
def compute_linear_combination_out(
    input: torch.Tensor, coefficients: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    return out
