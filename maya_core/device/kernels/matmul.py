"""Matrix products: cuBLAS and cublasLt, and what ATen copies so that they can read it. Follows cuda/Blas.cpp and cuda/cuBlasCommonArgs.h."""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Tensor, Work, kernel

EPILOGUE_DTYPES = ("Double", "Float", "Half", "BFloat16")


def _blas_reads(matrix: Tensor) -> bool:
    """Whether rows or columns (of each matrix of a batch) lie packed, one after the other."""
    if len(matrix.sizes) < 2:
        return True
    (rows, columns), (row_step, column_step) = matrix.sizes[-2:], matrix.strides[-2:]
    return (column_step == 1 and row_step >= max(1, columns)) or (row_step == 1 and column_step >= max(1, rows))


@kernel(
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addmv",
    "addbmm",
    "_addmm_activation",
    "_scaled_mm",
    "_scaled_grouped_mm",
    "dot",
    "vdot",
)
def matmul(call: Call) -> Work:
    """One cuBLAS call with its workspace; a bias that is not a row cublasLt can add is copied in first."""
    work = Work().out(0)
    if call.name in ("addmm", "baddbmm", "addmv") and not _bias_in_epilogue(call) and call.get("beta", 1) != 0:
        work.launches += 1
    for matrix in call.inputs[-2:]:
        if not _blas_reads(matrix):
            work.temporary(matrix.nbytes)
            work.launches += 1
    given = call.get("out")
    if given is not None and not _blas_reads(given):  # worked on in a copy, and copied back
        work.temporary(given.nbytes)
        work.launches += 2
    return work.blas()


def _bias_in_epilogue(call: Call) -> bool:
    bias, first, second = call.inputs[:3]
    if call.name != "addmm" or len(bias.sizes) != 1 or not bias.is_contiguous or call.get("beta", 1) != 1:
        return False
    if bias.sizes[0] != second.sizes[1] or min(second.sizes) <= 1 or not call.results[0].is_contiguous:
        return False
    return all(t.dtype in EPILOGUE_DTYPES for t in (first, second))


@kernel("_grouped_mm")
def grouped_mm(call: Call) -> Work:
    """CUTLASS's grouped kernel on sm_90 and later (GroupMM.cu); before, the offsets are read back and each group is a product."""
    offsets = call.get("offs")
    groups = offsets.sizes[0] if offsets is not None else call.inputs[0].sizes[0]
    if call.capability < 90:
        return Work(launches=1 if offsets is None else 1 + groups).out(0).blas()
    work = Work(launches=2).out(0)  # a kernel writes each group's problem, pointers and strides first
    work.temporary(60 * groups)
    work.temporary(512 * call.sms)
    return work
