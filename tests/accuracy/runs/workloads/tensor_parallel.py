"""Megatron's tensor parallelism by hand: linears split by columns and by rows, and what has to be exchanged around them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Group = dist.ProcessGroup


class _ColumnLinear(torch.autograd.Function):
    """The gradient of the input is summed over the ranks while that of the weight is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        given = grads[0].flatten(0, -2)
        to_input = given @ weight
        summed = dist.all_reduce(to_input, group=ctx.group, async_op=True)
        to_weight = given.t() @ x.flatten(0, -2)
        to_bias = given.sum(0) if ctx.has_bias else None
        summed.wait()
        return to_input.view_as(x), to_weight, to_bias, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].split(ctx.width, dim=-1)[ctx.group.rank()].contiguous(), None


class ColumnLinear(nn.Linear):
    """Every rank has some of the outputs."""

    def __init__(self, inputs: int, outputs: int, group: Group, bias: bool = True) -> None:
        super().__init__(inputs, outputs // group.size(), bias=bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size() == 1:
            return super().forward(x)
        return _ColumnLinear.apply(x, self.weight, self.bias, self.group)


class RowLinear(nn.Linear):
    """Every rank has some of the inputs; outputs are summed."""

    def __init__(self, inputs: int, outputs: int, group: Group, bias: bool = True) -> None:
        super().__init__(inputs // group.size(), outputs, bias=bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size() == 1:
            return super().forward(x)
        summed = _Sum.apply(F.linear(x, self.weight), self.group)
        return summed if self.bias is None else summed + self.bias


class ColumnEmbedding(nn.Embedding):
    """Every rank has some of the columns of the table."""

    def __init__(self, rows: int, width: int, group: Group) -> None:
        super().__init__(rows, width // group.size())
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        return found if self.group.size() == 1 else _GatherColumns.apply(found, self.group)


class RowEmbedding(nn.Embedding):
    """Every rank has some of the rows of the table: the others' tokens become zeros, and all are summed."""

    def __init__(self, rows: int, width: int, group: Group) -> None:
        super().__init__(rows // group.size(), width)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        if self.group.size() == 1:
            return super().forward(ids)
        first = self.group.rank() * self.num_embeddings
        outside = (ids < first) | (ids >= first + self.num_embeddings)
        own = (ids - first).masked_fill(outside, 0)
        return _Sum.apply(super().forward(own).masked_fill(outside.unsqueeze(-1), 0.0), self.group)
