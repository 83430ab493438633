"""Solvers, factorizations and transforms of cuSOLVER, cuFFT and others, which were not measured. Their durations are lower bounds, from their
bytes and their arithmetic at the GPU's peak, and predictions name them. Resulting matrices are column-major, as LAPACK and cuSOLVER write them.

Counts of operations are those of Golub and Van Loan, Matrix Computations (4th edition), for the algorithms that LAPACK uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from maya_core.hardware.platform import Platform
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.unknown import unknown
from maya_core.ops.work import Work
from maya_core.trace.call import Call

LINALG = aten(
    "_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "linalg_cholesky_ex",
    "linalg_eig", "linalg_eigvals", "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex",
    "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex", "linalg_matrix_exp", "linalg_qr", "_fft_c2c", "_fft_c2r", "_fft_r2c",
)  # fmt: skip
SOLVERS = aten(
    "cholesky", "cholesky_inverse", "geqrf", "ormqr", "lu_unpack", "_cdist_forward",
    "_cdist_backward", "_pdist_forward", "_pdist_backward", "mode", "kthvalue", "median", "nanmedian", "renorm", "renorm_",
    "_compute_linear_combination",
)  # fmt: skip


@op(*LINALG, *SOLVERS)
def solver(call: Call, platform: Platform) -> Work:
    return unknown(call, _flops(call))


def _flops(call: Call) -> float:
    """The operations of the call, where they are counted; 0 otherwise."""
    count = FLOPS.get(call.name.removeprefix("aten::"))
    matrix = call.inputs[0] if call.inputs else None
    if count is None or matrix is None or len(matrix.sizes) < 2:
        return 0.0
    *batch, rows, columns = matrix.sizes
    other = call.inputs[1] if len(call.inputs) > 1 else None
    sides = 0 if other is None else other.numel // max(1, math.prod(batch) * rows)
    complex_numbers = 4 if matrix.dtype.startswith("Complex") else 1
    return complex_numbers * math.prod(batch) * count(float(rows), float(columns), float(sides), call)


def _factored(m: float, n: float) -> float:
    """Of a QR factorization without Q; the same again makes Q."""
    m, n = max(m, n), min(m, n)
    return 2 * m * n**2 - 2 / 3 * n**3


def _decomposed(m: float, n: float, sides: float, call: Call) -> float:
    """Of singular values; with their vectors, if those are wanted."""
    m, n = max(m, n), min(m, n)
    return 6 * m * n**2 + 20 * n**3 if call.get("compute_uv", True) else 4 * m * n**2 - 4 / 3 * n**3


# By the rows and columns of a matrix, and the number of right-hand sides.
FLOPS: dict[str, Callable[[float, float, float, Call], float]] = {
    "_linalg_solve_ex": lambda m, n, sides, _: 2 / 3 * n**3 + 2 * n**2 * sides,
    "_linalg_det": lambda m, n, *_: 2 / 3 * n**3,
    "_linalg_slogdet": lambda m, n, *_: 2 / 3 * n**3,
    "linalg_lu": lambda m, n, *_: min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "linalg_lu_factor_ex": lambda m, n, *_: min(m, n) ** 2 * (max(m, n) - min(m, n) / 3),
    "linalg_inv_ex": lambda m, n, *_: 2 * n**3,
    "linalg_cholesky_ex": lambda m, n, *_: n**3 / 3,
    "cholesky": lambda m, n, *_: n**3 / 3,
    "cholesky_inverse": lambda m, n, *_: 2 / 3 * n**3,
    "linalg_ldl_factor_ex": lambda m, n, *_: n**3 / 3,
    "linalg_qr": lambda m, n, *_: 2 * _factored(m, n),
    "geqrf": lambda m, n, *_: _factored(m, n),
    "linalg_householder_product": lambda m, n, *_: _factored(m, n),
    "linalg_lstsq": lambda m, n, sides, _: _factored(m, n) + 4 * m * n * sides,
    "_linalg_eigh": lambda m, n, sides, call: 9 * n**3 if call.get("compute_v", True) else 4 / 3 * n**3,
    "linalg_eig": lambda m, n, *_: 25 * n**3,
    "linalg_eigvals": lambda m, n, *_: 10 * n**3,
    "_linalg_eigvals": lambda m, n, *_: 10 * n**3,
    "_linalg_svd": _decomposed,
    "linalg_matrix_exp": lambda m, n, *_: (
        10 * n**3
    ),  # a Taylor polynomial of degree 18 takes five products, before any squaring
}


@op(
    *aten(
        "linalg_lu_solve", "linalg_ldl_solve", "_cholesky_solve_helper", "linalg_solve_triangular", "triangular_solve"
    )
)
def back_substitution(call: Call, platform: Platform) -> Work:
    """Solves with a factor: two triangles of it, or one."""
    sides, factor = sorted(call.inputs[:2], key=lambda each: each.sizes[-1] == each.sizes[-2])
    one = call.name.endswith(("solve_triangular", "triangular_solve"))
    return unknown(call, (1 if one else 2) * sides.numel * factor.sizes[-1])


values(*LINALG, *aten("linalg_lu_solve", "linalg_ldl_solve", "linalg_solve_triangular"), heavy=True)


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
