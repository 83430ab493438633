"""torch's own Triton kernels run under an emulation that begins after torch is imported, as they do on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import maya_core
from maya_core.torch_seam import native_kernels
from maya_core.torch_seam.version import installed

pytestmark = pytest.mark.skipif(
    installed().version < (2, 13) or importlib.util.find_spec("triton") is None,
    reason="torch has such kernels since 2.13, if Triton is installed",
)


def launched() -> list[str]:
    with maya_core.emulate("h100") as job:
        column, row = torch.empty(4, 8, 1, device="cuda"), torch.empty(4, 1, 64, device="cuda")
        torch.bmm(column, row)
        torch.bmm(row, torch.empty(4, 64, 8, device="cuda"))
    return [call.name for call in job.trace.calls]


def test_they_run_in_each_emulation_and_are_as_before_afterwards() -> None:
    before = {key: len(each) for key, each in native_kernels.DESCRIBED.get().items()}
    for _ in range(2):
        assert launched() == ["triton::_bmm_outer_product_kernel", "aten::bmm"]
        assert {key: len(each) for key, each in native_kernels.DESCRIBED.get().items()} == before
        assert torch.bmm(torch.ones(1, 2, 1), torch.ones(1, 1, 2)).tolist() == [[[1, 1], [1, 1]]]
