"""What ops allocate in versions of torch that differ, as their CUDA builds do over a fake runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.plan import plan
from maya_core.ops.products import blas_workspace_bytes
from maya_core.ops.work import Step
from maya_core.pipeline import analyse
from maya_core.report.summary import summarize
from maya_core.torch_seam.version import COMPARED, FIRST, LAST, TRITON, numbers
from maya_core.trace.call import Call, Tensor
from maya_core.trace.job import read_job

MIB = 2**20
TRACES = Path(__file__).parents[1] / "golden" / "traces"
MATRIX = Tensor("Float", (512, 512), (512, 1), "cuda")
BIAS = Tensor("Float", (512,), (1,), "cuda")
MM = Call("aten::mm", ["self", "mat2"], [MATRIX, MATRIX], [MATRIX])
LINEAR = Call("aten::addmm", ["self", "mat1", "mat2", "beta", "alpha"], [BIAS, MATRIX, MATRIX, 1, 1], [MATRIX])


@pytest.mark.parametrize(
    ("gpu", "torch", "mib"),
    [
        ("a100", (2, 15), 8.125),
        ("h100", (2, 10), 32),
        ("b200", (2, 11), 8.125),
        ("b200", (2, 12), 32),
        ("b200", (2, 15), 32),
    ],
)
def test_the_workspace_of_cublas(gpu: str, torch: tuple[int, int], mib: float) -> None:
    assert blas_workspace_bytes(Platform(find_gpu(gpu), torch)) == mib * MIB


def temporaries(call: Call, torch: tuple[int, int]) -> list[int]:
    return [value for step, value in plan(call, Platform(find_gpu("h100"), torch)).program if step == Step.TEMPORARY]


def test_since_2_15_each_product_has_a_workspace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert temporaries(MM, (2, 14)) == []  # it is kept from the first product on
    assert temporaries(MM, (2, 15)) == [32 * MIB]
    assert temporaries(LINEAR, (2, 15)) == [MIB]  # in cublasLt, with the bias in its epilogue
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert temporaries(MM, (2, 15)) == []


def test_a_prediction_says_what_was_not_compared_with_another_version() -> None:
    job = read_job(TRACES / "lstm" / "h100")
    other = replace(job, ranks={0: replace(job.ranks[0], meta={**job.ranks[0].meta, "torch": "2.15.0+cu132"})})
    notes = [
        [note for note in summarize(analyse(each)).caveats if "compiled programs only" in note] for each in (job, other)
    ]
    assert [len(each) for each in notes] == [0, 1]
    assert notes[1][0].startswith("This is torch 2.15.0+cu132.")


def test_versions_are_read_as_torch_states_them() -> None:
    assert [numbers(text) for text in ("2.13.0+cpu", "2.10.1", "2.16.0a0+git1234")] == [(2, 13), (2, 10), (2, 16)]
    assert FIRST <= COMPARED <= LAST
    assert list(TRITON) == [(2, minor) for minor in range(FIRST[1], LAST[1] + 1)]
