"""Matrix products: cuBLAS, cublasLt and CUTLASS kernels, and the copies that ATen makes so that they can read their operands.

Follows cuda/Blas.cpp, cuda/cuBlasCommonArgs.h and GroupMM.cu of ATen/native/cuda.
"""

from __future__ import annotations

import os

from maya_core.hardware.dtypes import HALVES, dtype
from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import INCLUDED, NN, NT, TN, TT, Copy, Gemm, GroupedGemm, Streaming
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op, values
from maya_core.ops.rules import describe
from maya_core.ops.traffic import moved, relaid, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call, Tensor

MIB = 2**20
EPILOGUE_DTYPES = ("Double", "Float", "Half", "BFloat16")
FIRST_TF32 = 80  # compute capability
COMPLEX = 4  # real products in a complex one
LAYOUTS = {
    (True, False): TN,
    (True, True): NN,
    (False, True): NT,
    (False, False): TT,
}  # by whether A and B are row-major
WITH_SUMMAND = aten(
    "addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_", "_addmm_activation", "addbmm", "addbmm_"
)

ONLY_IN_LT = aten("_addmm_activation", "_scaled_mm", "_scaled_mm_v2", "_int_mm")  # products that only cublasLt has
LT_WORKSPACE = MIB  # of cublasLt, in versions of torch where it does not share cuBLAS's


def blas_workspace_bytes(platform: Platform) -> int:
    """The size of the workspace that ATen gives cuBLAS (ATen/cuda/CublasHandlePool.cpp)."""
    if conf := os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        try:  # ":SIZE_KIB:COUNT" pairs
            numbers = [int(part) for part in conf.split(":") if part]
            return sum(size * 1024 * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))
        except ValueError:
            pass  # ATen warns and uses the default
    major = platform.gpu.compute_capability[0]
    large = major >= 9 if platform.since(2, 12) else major == 9  # Blackwell's has that of Hopper since 2.12
    return 32 * MIB if large else 2 * 4096 * 1024 + 8 * 16 * 1024


def _with_workspace(work: Work, platform: Platform, in_lt: bool = False) -> Work:
    """Until torch 2.14 the first product allocates a workspace for all; cublasLt has another one until 2.11. Since 2.15 each product
    allocates its own and frees it, unless TORCH_CUBLAS_WORKSPACE_CACHE asks for the former."""
    if not platform.since(2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1":
        work.blas(blas_workspace_bytes(platform))
        return work.lt(LT_WORKSPACE) if in_lt and not platform.since(2, 12) else work
    return work.free(work.temporary(LT_WORKSPACE if in_lt else blas_workspace_bytes(platform)))


def _blas_reads(matrix: Tensor) -> bool:
    """Whether BLAS can read a matrix: its rows or columns (in each matrix of a batch) are packed."""
    if len(matrix.sizes) < 2:
        return True
    (rows, columns), (down, across) = matrix.sizes[-2:], matrix.strides[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _row_major(matrix: Tensor) -> bool:
    """Whether rows are packed. An operand that BLAS cannot read is copied, and then they are. Vectors count as full matrices."""
    (rows, columns), (down, across) = matrix.sizes[-2:], matrix.strides[-2:]
    if not _blas_reads(matrix):
        return True
    return (across == 1 and down >= columns) if rows > 1 and columns > 1 else not (down == 1 and across > 1)


def gemm_layout(first: Tensor, second: Tensor) -> int:
    return LAYOUTS[_row_major(first), _row_major(second)]


def rate_of(call: Call, operand: Tensor, platform: Platform) -> str:
    """The rate at which products of such operands run: float32 uses tensor cores if the program allows TF32."""
    if operand.dtype == "Float" and call.settings.tf32_products and platform.capability >= FIRST_TF32:
        return "tf32"
    return dtype(operand.dtype).rate


def _gemm(call: Call, first: Tensor, second: Tensor, platform: Platform) -> Gemm:
    batch = first.sizes[0] if len(first.sizes) == 3 else 1
    m, k, n = first.sizes[-2], first.sizes[-1], second.sizes[-1]
    if first.dtype.startswith("Complex"):
        k *= COMPLEX
    return Gemm(rate_of(call, first, platform), batch, m, n, k, gemm_layout(first, second))


def _operands(call: Call) -> tuple[Tensor, Tensor]:
    first, second = call.inputs[1:3] if call.name in WITH_SUMMAND else call.inputs[:2]
    return first, second


def product_flops(call: Call) -> int:
    first, second = _operands(call)
    return 2 * first.numel * (second.sizes[-1] if len(second.sizes) > 1 else 1)


def _copied(matrix: Tensor) -> Streaming:
    """Copies an operand that BLAS cannot read; one that is contiguous but unreadable (overlapping rows) is copied, too."""
    return streaming("strided", [matrix], [matrix]) if matrix.is_contiguous else relaid(matrix, matrix.packed())


def _multiply(
    work: Work, call: Call, platform: Platform, first: Tensor, second: Tensor, kernel: Gemm | Streaming
) -> Work:
    for matrix in (first, second):
        if not _blas_reads(matrix):
            work.temporary(matrix.nbytes)
            work.launch(_copied(matrix))
    given = call.get("out")
    if given is not None and not _blas_reads(given):  # computed in a copy, which is then copied back
        work.temporary(given.nbytes)
        copy = _copied(given)
        return _with_workspace(work.launch(copy, kernel, copy), platform)
    in_lt = call.name in ONLY_IN_LT or (call.name in WITH_SUMMAND and _by_lt(call, platform))
    return _with_workspace(work.launch(kernel), platform, in_lt)


@op(*aten("mm", "bmm", "_scaled_mm", "_scaled_mm_v2", "_int_mm"), flops=product_flops)
def product(call: Call, platform: Platform) -> Work:
    first, second = _operands(call)
    return _multiply(Work().out(0), call, platform, first, second, _gemm(call, first, second, platform))


def _bias_in_epilogue(call: Call) -> bool:
    """Whether cublasLt adds the summand as a bias in its epilogue."""
    bias, first, second = call.inputs[:3]
    if (
        not call.name.startswith("aten::addmm")
        or len(bias.sizes) != 1
        or not bias.is_contiguous
        or call.get("beta", 1) != 1
    ):
        return False
    if bias.sizes[0] != second.sizes[1] or min(second.sizes) <= 1 or not call.results[0].is_contiguous:
        return False
    return all(t.dtype in EPILOGUE_DTYPES for t in (first, second))


def _summand_is_read(call: Call, platform: Platform) -> bool:
    """Whether cublasLt reads a whole matrix of summands where it is, instead of in the result (since torch 2.14, and of halves only)."""
    summand, first, second = call.inputs[:3]
    if not platform.since(2, 14) or call.name != "aten::addmm" or first.dtype not in HALVES:
        return False
    rows_packed = len(summand.sizes) == 2 and summand.strides[1] == 1 and summand.strides[0] >= summand.sizes[1]
    return rows_packed and summand.sizes == call.results[0].sizes and min(*first.sizes, *second.sizes) > 1


def _by_lt(call: Call, platform: Platform) -> bool:
    """Whether cublasLt computes a product with a summand, which needs no copy of it."""
    return _bias_in_epilogue(call) or _summand_is_read(call, platform)


def _summand(work: Work, call: Call) -> Work:
    """Copies the summand into the result first."""
    summand, result = call.inputs[0], call.results[0]
    alike = summand.sizes == result.sizes and summand.is_contiguous
    return work.launch(Copy("d2d", result.nbytes) if alike else streaming("strided", [summand], [result]))


@op(*aten("addmm", "baddbmm"), flops=product_flops)
def product_and_sum(call: Call, platform: Platform) -> Work:
    first, second = _operands(call)
    work = Work().out(0)
    if not _by_lt(call, platform) and call.get("beta", 1) != 0:
        _summand(work, call)
    return _multiply(work, call, platform, first, second, _gemm(call, first, second, platform))


@op(*aten("addmm_", "baddbmm_", "_addmm_activation"), flops=product_flops)
def product_added(call: Call, platform: Platform) -> Work:
    """The summand is the result itself, or a bias in the epilogue."""
    first, second = _operands(call)
    return _multiply(Work().out(0), call, platform, first, second, _gemm(call, first, second, platform))


@op(*aten("addbmm", "addbmm_"))
def sum_of_products(call: Call, platform: Platform) -> Work:
    first, second = _operands(call)
    return _multiply(Work().out(0), call, platform, first, second, _gemm(call, first, second, platform))


@op(*aten("mv", "addmv", "addmv_"), flops=product_flops)
def matrix_vector(call: Call, platform: Platform) -> Work:
    matrix, vector = _operands(call)
    kernel = Gemm(
        rate_of(call, matrix, platform), 1, matrix.sizes[0], 1, matrix.sizes[1], TN if _row_major(matrix) else NT
    )
    work = Work().out(0)
    if call.name == "aten::addmv" and call.get("beta", 1) != 0:
        work.launch(streaming("strided", call.inputs[:1], call.results))
    return _multiply(work, call, platform, matrix, vector, kernel)


@op(*aten("dot", "vdot"))
def dot(call: Call, platform: Platform) -> Work:
    """A reduction by cuBLAS: it reads two vectors, each once."""
    first, second = call.inputs[:2]
    kernel = streaming("reduction", [first, second], call.results, row=first.numel, elements=first.numel)
    return _with_workspace(Work().out(0).launch(kernel), platform)


def grouped_flops(call: Call) -> int:
    first, second = call.inputs[:2]
    inner = first.sizes[-1]
    if len(first.sizes) == 2 and len(second.sizes) == 2:  # groups along the inner dimension
        return 2 * first.sizes[0] * inner * second.sizes[-1]
    return 2 * call.results[0].numel * inner


def _groups(call: Call) -> tuple[int, float, float, float]:
    """The number of groups, the rows of all together, and the columns and inner dimension of one. How the rows are divided depends
    on values: groups are assumed to be equal."""
    first, second = call.inputs[:2]
    offsets = call.get("offs")
    groups = offsets.sizes[0] if offsets is not None else first.sizes[0]
    m, k, n = float(first.sizes[-2]), float(first.sizes[-1]), float(second.sizes[-1])
    if len(first.sizes) == 2 and len(second.sizes) == 2:  # groups along the inner dimension
        return groups, m * groups, n, k / groups
    if len(first.sizes) == 3:
        return groups, m * groups, n / groups if len(second.sizes) == 2 else n, k
    return groups, m, n, k


@op("aten::_grouped_mm", flops=grouped_flops)
def grouped(call: Call, platform: Platform) -> Work:
    """CUTLASS's grouped kernel for bfloat16 on sm_90 and sm_100 (GroupMM.cu); otherwise the offsets are copied to the host, and each group
    is a product of its own."""
    first, second = call.inputs[:2]
    groups, m, n, k = _groups(call)
    rate, layout = rate_of(call, first, platform), gemm_layout(first, second)
    offsets = call.get("offs")
    work = Work().out(0)
    if platform.capability // 10 not in (9, 10) or (first.dtype, second.dtype) != ("BFloat16", "BFloat16"):
        if offsets is None:  # a batched product
            return _with_workspace(work.launch(Gemm(rate, groups, m / groups, n, k, layout)), platform)
        each = Gemm(rate, 1, max(1, m / groups), n, k, layout)
        return _with_workspace(work.launch(Copy("d2h", moved(offsets)), *[each] * groups), platform)
    work.temporary(60 * groups)
    work.temporary(512 * platform.sms)
    # First, a kernel writes the problem sizes, pointers and strides of each group.
    return work.launch(INCLUDED, GroupedGemm(rate, groups, m, n, k, layout))


@op("aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2", flops=grouped_flops)
def scaled_grouped(call: Call, platform: Platform) -> Work:
    first, second = call.inputs[:2]
    groups, m, n, k = _groups(call)
    kernel = GroupedGemm(dtype(first.dtype).rate, groups, m, n, k, gemm_layout(first, second))
    return _with_workspace(Work().out(0).launch(kernel), platform)


values(
    *aten("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "_addmm_activation", "_scaled_mm",
          "_scaled_mm_v2", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "dot", "vdot", "mv",
          "addmv", "addmv_", "hspmm", "sspaddmm", "_weight_int4pack_mm", "_weight_int8pack_mm", "_cslt_sparse_mm",
          "_sparse_semi_structured_mm", "_sparse_semi_structured_addmm"),
    heavy=True,
)  # fmt: skip


# ---- results ----
@describe("aten::_scaled_mm.out", "aten::_scaled_mm_v2.out")
def scaled_mm_out(self: torch.Tensor, mat2: torch.Tensor, *_: object, out: torch.Tensor) -> torch.Tensor:
    return out.resize_((self.size(0), mat2.size(1)))


def _check_grouped_operand(matrix: torch.Tensor) -> None:
    """Checks that rows or columns are packed, and start at multiples of 16 bytes."""
    row, column = matrix.stride()[-2:]
    rows, columns = matrix.shape[-2:]
    if column == 1 and row >= max(1, columns):
        leading = row
    elif row == 1 and column >= max(1, rows):
        leading = column
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {list(matrix.stride())} for strides and {list(matrix.shape)} for sizes"
        )
    if leading * matrix.element_size() % 16:
        raise RuntimeError("strides should be multiple of 16 bytes")


@describe("aten::_grouped_mm")
def grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's Meta kernel requires bfloat16; CUDA multiplies other types group by group. Rows are padded to 16 bytes."""
    for matrix in (self, mat2):
        _check_grouped_operand(matrix)
    dtype = out_dtype or self.dtype
    rows = self.size(0) if self.dim() == 2 else self.size(1)
    groups = offs.size(0) if self.dim() == mat2.dim() == 2 and offs is not None else self.size(0)
    shape = [rows, mat2.size(-1)] if self.dim() != mat2.dim() else [groups, rows, mat2.size(-1)]
    per_line = 16 // dtype.itemsize
    padded = -(-shape[-1] // per_line) * per_line
    strides = [padded, 1] if len(shape) == 2 else [rows * padded, padded, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
