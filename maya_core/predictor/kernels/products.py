"""Matrix products: cuBLAS and CUTLASS kernels, and the copies before them. Follows cuda/Blas.cpp, GroupMM.cu of ATen/native/cuda.

Whether float32 products may use TF32 is a setting of the program that a signature does not carry: they are "float32".
"""

from __future__ import annotations

from maya_core.device.kernels.call import Tensor
from maya_core.predictor.kernels.kernel import INCLUDED, Kernel, Op, chain, contiguous_copy, memory, moved

DTYPES = {
    "BFloat16": "bfloat16", "Half": "float16", "Float": "float32", "Double": "float64", "Char": "int8", "Byte": "int8",
    "Float8_e4m3fn": "float8", "Float8_e5m2": "float8", "Float8_e4m3fnuz": "float8", "Float8_e5m2fnuz": "float8",
    "ComplexFloat": "float32", "ComplexDouble": "float64", "ComplexHalf": "float16",
}  # fmt: skip
COMPLEX = 4  # real products to a complex one
TN, NN, NT, TT = range(4)
LAYOUTS = {(True, False): TN, (True, True): NN, (False, True): NT, (False, False): TT}  # whether A, B are row-major


def dtype_of(tensor: Tensor) -> str:
    return DTYPES.get(tensor.dtype, "float8" if tensor.dtype.startswith("Float8") else "float32")


def _steps(matrix: Tensor) -> tuple[int, int]:
    return matrix.strides[-2], matrix.strides[-1]


def _blas_reads(matrix: Tensor) -> bool:
    if len(matrix.sizes) < 2:
        return True
    (rows, columns), (down, across) = matrix.sizes[-2:], _steps(matrix)
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _row_major(matrix: Tensor) -> bool:
    """Whether rows lie packed; what BLAS cannot read is copied so that they do. Of vectors, as for a full matrix."""
    (rows, columns), (down, across) = matrix.sizes[-2:], _steps(matrix)
    if not _blas_reads(matrix):
        return True
    return (across == 1 and down >= columns) if rows > 1 and columns > 1 else not (down == 1 and across > 1)


def gemm_layout(first: Tensor, second: Tensor) -> int:
    return LAYOUTS[_row_major(first), _row_major(second)]


def _gemm(first: Tensor, second: Tensor) -> Kernel:
    batch = first.sizes[0] if len(first.sizes) == 3 else 1
    m, k, n = first.sizes[-2], first.sizes[-1], second.sizes[-1]
    if first.dtype.startswith("Complex"):
        k *= COMPLEX
    return Kernel("gemm", dtype_of(first), (batch, m, n, k, gemm_layout(first, second)))


def _copies(*matrices: Tensor) -> list[Kernel]:
    return [copy for matrix in matrices if not _blas_reads(matrix) for copy in _copy(matrix)]


def _copy(matrix: Tensor) -> list[Kernel]:
    # what is contiguous but not readable (overlapping rows) is copied all the same
    return contiguous_copy(matrix) or [memory("strided", [matrix], [matrix])]


@chain("mm", "bmm", "_scaled_mm", "_int_mm")
def product(op: Op) -> list[Kernel]:
    first, second = op.inputs[:2]
    return [*_copies(first, second), _gemm(first, second)]


@chain("addmm", "baddbmm", "_addmm_activation", "addmm_", "baddbmm_")
def product_and_sum(op: Op) -> list[Kernel]:
    """The summand is copied into the result first, unless cublasLt adds it as a bias."""
    summand, first, second = op.inputs[:3]
    copies = _copies(first, second)
    before: list[Kernel] = []
    if op.launches > 1 + len(copies):
        result = op.results[0]
        if summand.sizes == result.sizes and summand.is_contiguous:
            before = [Kernel("copy", "d2d", (result.nbytes,))]
        else:
            before = [memory("strided", [summand], [result])]
    return [*before, *copies, _gemm(first, second)]


@chain("addbmm")
def sum_of_products(op: Op) -> list[Kernel]:
    first, second = op.inputs[1:3]
    return [_gemm(first, second)]


@chain("mv", "addmv", "addmv_")
def matrix_vector(op: Op) -> list[Kernel]:
    matrix, _ = op.inputs[-2:]
    kernel = Kernel(
        "gemm", dtype_of(matrix), (1, matrix.sizes[0], 1, matrix.sizes[1], TN if _row_major(matrix) else NT)
    )
    before = [memory("strided", op.inputs[:1], op.results)] if op.launches > 1 else []
    return [*before, kernel]


@chain("dot", "vdot")
def dot(op: Op) -> list[Kernel]:
    """cuBLAS reduces; two vectors are read and nothing is used twice."""
    first, second = op.inputs[:2]
    return [memory("reduction", [first, second], op.results, row=first.numel, elements=first.numel)]


@chain("_grouped_mm", "_scaled_grouped_mm")
def grouped(op: Op) -> list[Kernel]:
    """One kernel for all groups after one that writes their problems, or before sm_90 a product each after the offsets are read.

    How many rows fall to each group is a matter of values: they are taken to be alike.
    """
    first, second = op.inputs[:2]
    offsets = op.get("offs")
    groups = offsets.sizes[0] if offsets is not None else first.sizes[0]
    m, k, n = float(first.sizes[-2]), float(first.sizes[-1]), float(second.sizes[-1])
    if len(first.sizes) == 2 and len(second.sizes) == 2:  # groups along the inner dimension
        m, k = m * groups, k / groups
    elif len(first.sizes) == 3:
        m *= groups
        if len(second.sizes) == 2:
            n = n / groups
    layout = gemm_layout(first, second)
    dtype = dtype_of(first)
    if op.launches == groups + 1 and groups != 1:
        assert offsets is not None
        each = Kernel("gemm", dtype, (1, max(1, m / groups), n, k, layout))
        return [Kernel("copy", "d2h", (moved(offsets),)), *[each] * groups]
    kernel = Kernel("grouped_gemm", dtype, (groups, m, n, k, layout))
    return [INCLUDED, kernel] if op.launches > 1 else [kernel]
