"""Solvers and factorizations were not measured. What they take is at least their arithmetic at the GPU's peak; counts by hand."""

from __future__ import annotations

import pytest
import torch

import maya_core
from maya_core.hardware.catalog import find_gpu

N = 2048
CUBE = N**3
PEAK = {dtype: find_gpu("h100").peak_flops[dtype] for dtype in ("float32", "float64")}
CASES = [
    (lambda a, b: torch.linalg.solve(a, b), 2 / 3 * CUBE + 2 * CUBE),
    (lambda a, b: torch.linalg.solve(a, b[:, :1]), 2 / 3 * CUBE + 2 * N**2),
    (lambda a, b: torch.linalg.inv(a), 2 * CUBE),
    (lambda a, b: torch.linalg.cholesky_ex(a), CUBE / 3),
    (lambda a, b: torch.linalg.qr(a), 2 * (2 - 2 / 3) * CUBE),
    (lambda a, b: torch.linalg.eigh(a), 9 * CUBE),
    (lambda a, b: torch.linalg.svd(a), 26 * CUBE),
    (lambda a, b: torch.linalg.svdvals(a), (4 - 4 / 3) * CUBE),
    (lambda a, b: torch.linalg.det(a), 2 / 3 * CUBE),
    (lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), CUBE),
    (lambda a, b: torch.linalg.lu_factor(a), 2 / 3 * CUBE),
    (lambda a, b: torch.linalg.inv(a.view(16, N // 4, N // 4)), 16 * 2 * (N // 4) ** 3),
]


@pytest.mark.parametrize(("solve", "flops"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_solver_takes_at_least_its_arithmetic(solve, flops: float, dtype: str) -> None:
    with maya_core.emulate("h100") as job:
        a, b = torch.randn(2, N, N, device="cuda", dtype=getattr(torch, dtype))
        solve(a, b)
    seconds = job.prediction.recorded_s
    assert seconds is not None
    assert seconds >= flops / PEAK[dtype] * 0.98
    # It is a bound: other kernels of the program, and copies, take far less than twice as long here.
    assert seconds <= 2 * flops / PEAK[dtype] + 5e-3
