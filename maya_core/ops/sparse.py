"""Sparse ops for which CUDA has its own kernels. The other sparse ops run as torch composes them from dense ops.

The number of elements of a sparse result depends on which indices coincide. Indices usually are integers from the host (token ids), so this is
mostly known; where it is not, none are assumed to coincide.
"""

from __future__ import annotations

from collections.abc import Callable

from maya_core.hardware.platform import Platform
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op
from maya_core.ops.rules import Rules, as_on_cpu, compressed_rule, no_rule_message, rule, sparse_rule
from maya_core.ops.work import Work
from maya_core.trace.call import Call

# Ops with one implementation for CPU and CUDA, made of other ops only.
AS_ON_CPU = (
    "_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc",
    "_embedding_bag_backward",
)  # fmt: skip


@op(*aten("_coalesce", "_sparse_add", "_sparse_addmm", "_sparse_bmm", "_sparse_sparse_matmul", "sparse_mask", "_sparse_mask_projection",
          "_sparse_softmax", "_sparse_softmax_backward_data", "_sparse_sum_backward"))  # fmt: skip
def over_elements(call: Call, platform: Platform) -> Work:
    """cuSPARSE's kernels, described as one pass over the elements and their indices."""
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


for _name in AS_ON_CPU:
    rule(f"aten::{_name}")(as_on_cpu(_name))


def _coo(
    indices: torch.Tensor, values: torch.Tensor, size: torch.Size | list[int], coalesced: bool = False
) -> torch.Tensor:
    answer: torch.Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(indices, values, size, is_coalesced=coalesced)
    return answer


@sparse_rule("aten::_coalesce")
def coalesce(rules: Rules, self: torch.Tensor) -> torch.Tensor:
    indices, values = self._indices(), self._values()
    host_indices, host_values = rules.value(indices), rules.value(values)
    if host_indices is not None:
        size = self.shape[: self.sparse_dim()]
        stand_in = torch.zeros(values.size(0)) if host_values is None else host_values
        merged = _coo(host_indices, stand_in, [*size, *stand_in.shape[1:]]).coalesce()
        new_indices = rules.put(merged._indices().contiguous(), self.device)
        new_values = values.new_empty((new_indices.size(1), *values.shape[1:]))
        if host_values is not None:
            rules.remember(new_values, merged._values())
    else:
        new_indices, new_values = indices.new_empty(indices.shape), values.new_empty(values.shape)
    rules.wait(values)
    rules.record("aten::_coalesce", [indices, values], [new_indices, new_values])
    return _coo(new_indices, new_values, self.shape, coalesced=True)


def _dense_add(
    rules: Rules, dense: torch.Tensor, sparse: torch.Tensor, alpha: complex, out: torch.Tensor
) -> torch.Tensor:
    """dense + alpha * sparse, as on the GPU: copies if necessary, then adds the sparse values at their indices."""
    if out is not dense:
        out.resize_(dense.shape)
        out.copy_(dense)
    if sparse._nnz() == 0:
        return out
    indices, values = sparse._indices(), sparse._values()
    host_out, host_indices, host_values = (rules.value(tensor) for tensor in (out, indices, values))
    rules.record("aten::_sparse_add", [out, indices, values], [])
    if host_out is None or host_indices is None or host_values is None:
        rules.forget(out)
        return out
    return rules.remember(out, host_out.add(_coo(host_indices, host_values, sparse.shape), alpha=alpha))


@sparse_rule("aten::add.out")
def add_out(
    rules: Rules, self: torch.Tensor, other: torch.Tensor, *, alpha: complex = 1, out: torch.Tensor
) -> torch.Tensor:
    if not self.is_sparse:
        return _dense_add(rules, self, other, alpha, out)
    if not other.is_sparse:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    mine, theirs = self._values(), other._values()
    dtype = torch.result_type(self, other)
    values = torch.cat([mine.to(dtype), (theirs if alpha == 1 else theirs * alpha).to(dtype)])
    summed = _coo(torch.cat([self._indices(), other._indices()], 1), values.to(out.dtype), self.shape)
    return (
        out.copy_(summed)
        if out.shape == self.shape
        else out.sparse_resize_(self.shape, self.sparse_dim(), self.dense_dim()).copy_(summed)
    )


@sparse_rule("aten::mul.out")
def mul_out(rules: Rules, self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The elementwise product of two sparse tensors, which has elements where both have one."""
    if not isinstance(other, torch.Tensor):  # torch passes numbers to Python as numbers
        return out.copy_(_coo(self._indices(), (self._values() * other).to(out.dtype), self.shape, self.is_coalesced()))
    if other.dim() == 0 or self.dim() == 0:
        tensor, number = (self, other) if other.dim() == 0 else (other, self)
        number = number.to_dense() if number.is_sparse else number
        return out.copy_(
            _coo(tensor._indices(), (tensor._values() * number).to(out.dtype), tensor.shape, tensor.is_coalesced())
        )
    if not (self.is_sparse and other.is_sparse):
        sparse, dense = (self, other) if self.is_sparse else (other, self)
        sparse = sparse.coalesce()
        picked = dense.expand(sparse.shape)[tuple(sparse._indices())]
        return out.copy_(_coo(sparse._indices(), (sparse._values() * picked).to(out.dtype), sparse.shape, True))
    mine, theirs = self.coalesce(), other.coalesce()
    where = rules.on_host(_common_columns, mine._indices(), theirs._indices())
    if where is None:
        count = min(mine._nnz(), theirs._nnz())
        in_mine = in_theirs = torch.arange(count, device=self.device)
    else:
        in_mine, in_theirs = (rules.put(index, self.device) for index in where)
    values = mine._values()[in_mine] * theirs._values()[in_theirs]
    return out.copy_(_coo(mine._indices()[:, in_mine], values.to(out.dtype), self.shape, True))


def _common_columns(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions in a and in b of their common columns."""
    places = {tuple(column): i for i, column in enumerate(b.t().tolist())}
    both = [(i, places[tuple(column)]) for i, column in enumerate(a.t().tolist()) if tuple(column) in places]
    pairs = torch.tensor(both, dtype=torch.int64).reshape(-1, 2)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


# ---- products with dense matrices ----
def _product(
    rules: Rules,
    op: str,
    out: torch.Tensor,
    dense_inputs: list[torch.Tensor],
    sparse: torch.Tensor,
    compute: Callable[..., torch.Tensor],
) -> torch.Tensor:
    indices, values = sparse._indices(), sparse._values()
    rules.record(op, [*dense_inputs, indices, values], [out])
    known = rules.on_host(
        lambda i, v, *dense: compute(_coo(i, v, sparse.shape), *dense), indices, values, *dense_inputs
    )
    if known is None:
        rules.forget(out)
        return out
    return rules.remember(out, known)


@sparse_rule("aten::addmm")
def addmm(
    rules: Rules, self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: complex = 1, alpha: complex = 1
) -> torch.Tensor:
    out = mat2.new_empty((mat1.size(0), mat2.size(1)))
    answer: torch.Tensor = addmm_out(rules, self, mat1, mat2, beta=beta, alpha=alpha, out=out)
    return answer


@sparse_rule("aten::addmm_")
def addmm_(
    rules: Rules, self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: complex = 1, alpha: complex = 1
) -> torch.Tensor:
    answer: torch.Tensor = addmm_out(rules, self, mat1, mat2, beta=beta, alpha=alpha, out=self)
    return answer


@sparse_rule("aten::addmm.out")
def addmm_out(
    rules: Rules,
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    if not mat1.is_sparse or mat2.is_sparse or self.is_sparse:
        raise RuntimeError(
            "addmm: the emulated device multiplies a sparse matrix with a dense one, and adds to a dense one"
        )
    mat1 = mat1.coalesce()
    out.resize_((mat1.size(0), mat2.size(1)))
    return _product(
        rules,
        "aten::_sparse_addmm",
        out,
        [self, mat2],
        mat1,
        lambda m, s, d: torch.addmm(s, m, d, beta=beta, alpha=alpha),
    )


@sparse_rule("aten::bmm")
def bmm(rules: Rules, self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = bmm_out(rules, self, mat2, out=mat2.new_empty((self.size(0), self.size(1), mat2.size(2))))
    return answer


@sparse_rule("aten::bmm.out")
def bmm_out(rules: Rules, self: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    out.resize_((self.size(0), self.size(1), mat2.size(2)))
    return _product(rules, "aten::_sparse_bmm", out, [mat2], self.coalesce(), torch.bmm)


@sparse_rule("aten::_sparse_sparse_matmul")
def sparse_sparse_matmul(rules: Rules, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The product of unknown matrices is assumed to have as many elements as the fuller of the two."""
    parts = (self._indices(), self._values(), other._indices(), other._values())

    def multiply(i: torch.Tensor, v: torch.Tensor, j: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = torch.sparse.mm(_coo(i, v, self.shape), _coo(j, w, other.shape)).coalesce()
        return answer

    known = rules.on_host(multiply, *parts)
    size = torch.Size((self.size(0), other.size(1)))
    if known is not None:
        indices, values = rules.put(known._indices(), self.device), rules.put(known._values(), self.device)
    else:
        elements = min(max(self._nnz(), other._nnz()), size[0] * size[1])
        indices, values = parts[0].new_empty((2, elements)), parts[1].new_empty(elements)
    rules.wait(self._values())
    rules.record("aten::_sparse_sparse_matmul", parts, [indices, values])
    return _coo(indices, values, size, coalesced=True)


# ---- selecting and normalizing elements ----
@sparse_rule("aten::sparse_mask")
def sparse_mask(rules: Rules, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements of self at the places where the mask has elements."""
    indices = mask._indices()
    if not self.is_sparse:
        return _coo(indices.clone(), self[tuple(indices)], mask.shape, mask.is_coalesced())

    def pick(i: torch.Tensor, v: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (
            _coo(i, v, self.shape)
            .coalesce()
            .sparse_mask(_coo(j, torch.ones(j.size(1)), self.shape, mask.is_coalesced()))
            ._values()
        )

    values = self._values().new_empty((mask._nnz(), *self._values().shape[1:]))
    rules.record("aten::sparse_mask", [self._indices(), self._values(), indices], [values])
    known = rules.on_host(pick, self._indices(), self._values(), indices) if self.dense_dim() == 0 else None
    if known is not None:
        rules.remember(values, known)
    return _coo(indices.clone(), values, mask.shape, mask.is_coalesced())


@sparse_rule("aten::_sparse_mask_projection")
def sparse_mask_projection(
    rules: Rules, self: torch.Tensor, mask: torch.Tensor, accumulate_matches: bool = False
) -> torch.Tensor:
    """The gradient of sparse_mask: the elements of self at the places of the mask, assumed to be all of them."""
    values = torch.empty_like(self._values())
    rules.record("aten::_sparse_mask_projection", [self._indices(), self._values(), mask._indices()], [values])
    return _coo(self._indices().clone(), values, self.shape, self.is_coalesced())


@sparse_rule("aten::index_select")
def index_select(rules: Rules, self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """With unknown indices, each selected slice is assumed to have an average share of the elements."""
    dim %= self.dim()
    size = [*self.shape[:dim], index.numel(), *self.shape[dim + 1 :]]
    indices, values = self._indices(), self._values()
    if dim >= self.sparse_dim():
        return _coo(indices, values.index_select(dim - self.sparse_dim() + 1, index), size)
    chosen = rules.on_host(_select_columns, indices[dim], index)
    if chosen is None:
        share = self._nnz() * index.numel() // max(self.size(dim), 1)
        return _coo(indices.new_empty((indices.size(0), share)), values.new_empty((share, *values.shape[1:])), size)
    columns, places = (rules.put(host, self.device) for host in chosen)
    new_indices = indices.index_select(1, columns)
    new_indices[dim].copy_(places)
    return _coo(new_indices, values.index_select(0, columns), size)


def _select_columns(along: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The selected columns, and the new position of each along the dimension."""
    places, columns = (index.reshape(-1, 1) == along.reshape(1, -1)).nonzero(as_tuple=True)
    return columns, places


@sparse_rule("aten::_sparse_softmax", "aten::_sparse_log_softmax")
def softmax(rules: Rules, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    self = self.coalesce()
    values = torch.empty_like(self._values())
    rules.record("aten::_sparse_softmax", [self._indices(), self._values(), dim], [values])
    return _coo(self._indices().clone(), values, self.shape, coalesced=True)


@sparse_rule("aten::_sparse_softmax_backward_data", "aten::_sparse_log_softmax_backward_data")
def softmax_backward(
    rules: Rules, grad: torch.Tensor, output: torch.Tensor, dim: int, self: torch.Tensor
) -> torch.Tensor:
    output = output.coalesce()
    values = torch.empty_like(output._values())
    rules.record("aten::_sparse_softmax_backward_data", [grad._values(), output._values(), dim], [values])
    return _coo(output._indices().clone(), values, self.shape, coalesced=True)


@sparse_rule("aten::_sparse_sum_backward")
def sum_backward(rules: Rules, grad: torch.Tensor, self: torch.Tensor, dims: list[int]) -> torch.Tensor:
    values = torch.empty_like(self._values())
    rules.record("aten::_sparse_sum_backward", [self._indices(), self._values()], [values])
    return _coo(self._indices().clone(), values, self.shape, self.is_coalesced())


# ---- compressed layouts, such as CSR ----
@compressed_rule("aten::addmm.out")
def compressed_addmm_out(
    rules: Rules,
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    """The product of a compressed and a dense matrix. Other products of cuSPARSE have no rule."""
    if mat1.layout != torch.sparse_csr or mat2.layout != torch.strided or out.layout != torch.strided:
        raise NotImplementedError(no_rule_message("aten::addmm.out", "only CSR matrices by dense ones"))
    out.resize_((mat1.size(0), mat2.size(1)))
    rows, columns, values = mat1.crow_indices(), mat1.col_indices(), mat1.values()
    rules.record("aten::_sparse_addmm", [rows, columns, values, mat2], [out])

    def multiply(
        r: torch.Tensor, c: torch.Tensor, v: torch.Tensor, dense: torch.Tensor, added: torch.Tensor
    ) -> torch.Tensor:
        return torch.addmm(added, torch.sparse_csr_tensor(r, c, v, mat1.shape), dense, beta=beta, alpha=alpha)

    known = rules.on_host(multiply, rows, columns, values, mat2, self) if values.dim() == 1 else None
    if known is None:
        rules.forget(out)
        return out
    return rules.remember(out, known)


@compressed_rule("aten::addmm")
def compressed_addmm(
    rules: Rules, self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: complex = 1, alpha: complex = 1
) -> torch.Tensor:
    answer: torch.Tensor = compressed_addmm_out(
        rules, self, mat1, mat2, beta=beta, alpha=alpha, out=mat2.new_empty((mat1.size(0), mat2.size(1)))
    )
    return answer
