"""FP8 tensors with one scale. Products that sum over features use the tensor as it is; products that sum over tokens use a transposed
copy, because Hopper supports no other layout. From Blackwell on, one copy serves both. Tensors with several scales are in blocks.py.

What is allocated, in which order, and by which kernels it is filled follows transformer_engine/pytorch/tensor/float8_tensor.py and
csrc/quantizer.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from maya_megatron.engine import norms
from maya_megatron.engine.device import device, launch, product8
from maya_megatron.engine.precision import Recipe, histories


@dataclass
class Quantized:
    """An FP8 tensor of shape (tokens, features), or a weight of shape (outputs, inputs)."""

    rows: Any
    columns: Any
    scale: Any
    scale_of_columns: Any = None  # if columns have their own scales
    twice: bool = True  # whether sums over tokens need a second copy

    def by_rows(self) -> torch.Tensor:
        return self.rows

    def by_columns(self) -> torch.Tensor:
        return self.rows.t() if self.columns is None else self.columns

    def need_columns(self) -> None:
        """Creates the transposed copy, if it does not exist yet."""
        if self.twice and self.columns is None:
            self.columns = torch.empty(self.rows.shape[::-1], dtype=self.rows.dtype, device=self.rows.device)
            launch("fp8_transpose", [self.rows], [self.columns])

    def only_columns(self) -> None:
        self.need_columns()
        if self.twice:
            self.rows = None
        if self.scale_of_columns is not None:
            self.scale = None

    def parts(self) -> tuple[Any, ...]:
        """The parts that autograd saves."""
        return self.rows, self.columns, self.scale, self.scale_of_columns

    def clear(self) -> None:
        """Frees the memory, although autograd keeps saved tensors until the end of a node's backward."""
        for one in (self.rows, self.columns):
            if one is not None:
                one.data = torch.empty(0, dtype=one.dtype, device=one.device)


class Quantizer:
    """Quantizes one tensor of a layer to FP8, with one scale."""

    columns_gather = False  # whether columns can be gathered from ranks, or must be created again from the whole tensor

    def __init__(self, dtype: torch.dtype, scale: torch.Tensor, amax: torch.Tensor, delayed: bool, group: Any) -> None:
        self.dtype, self.scale, self.amax, self.delayed, self.group = dtype, scale, amax, delayed, group

    def empty(self, shape: Any, columns: bool, rows: bool = True) -> Quantized:
        scale = torch.empty(1, dtype=torch.float32, device="cuda")
        made = torch.empty(shape, dtype=self.dtype, device="cuda") if rows else None
        twice = device().transposes
        other = torch.empty(shape[::-1], dtype=self.dtype, device="cuda") if columns and twice else None
        return Quantized(made, other, scale, twice=twice)

    def __call__(self, x: torch.Tensor, columns: bool) -> Quantized:
        made = self.empty(x.shape, columns)
        self.fill(made, x)
        return made

    def fill(self, made: Quantized, x: torch.Tensor, amax_known: bool = False) -> None:
        if not x.numel():
            return
        if not self.delayed:
            if not amax_known:
                launch("amax", [x], [self.amax])
            if self.group is not None:
                dist.all_reduce(self.amax, op=dist.ReduceOp.MAX, group=self.group)
            launch("scale_from_amax", [self.amax], [self.scale])
        launch("quantize", [x, self.scale], [one for one in (made.rows, made.columns) if one is not None])

    def normalized(self, kind: str, x: torch.Tensor, columns: bool, *parameters: Any) -> tuple[Quantized, Any]:
        """The output of a norm. If the scale is already known, its kernel writes FP8; otherwise another kernel quantizes it."""
        made = self.empty(x.shape, columns)
        if not self.delayed:
            out, statistics = norms.forward(kind, x, *parameters)
            self.fill(made, out, amax_known=True)
            return made, statistics
        statistics = [
            torch.empty(len(x), 1, dtype=torch.float32, device=x.device) for _ in range(norms.STATISTICS[kind])
        ]
        launch(
            f"{kind.lower()}_quantize",
            [x, *(one for one in parameters[:-1] if one is not None)],
            [made.rows, *statistics],
        )
        if made.columns is not None:
            launch("fp8_transpose", [made.rows], [made.columns])
        return made, tuple(statistics)

    def gathered(self, local: Quantized, group: Any, columns: bool) -> Quantized:
        """Gathers the rows of all ranks and transposes them, because a collective cannot gather columns."""
        made = self.empty((local.rows.shape[0] * dist.get_world_size(group), local.rows.shape[1]), columns)
        dist.all_gather_into_tensor(made.rows, local.rows, group=group)
        if made.columns is not None:
            launch("fp8_transpose", [made.rows], [made.columns])
        return made

    def gathering(self, local: Quantized, group: Any) -> tuple[Quantized, Any]:
        """What the gradient of a weight needs, and a handle to wait for."""
        made = self.empty((local.rows.shape[0] * dist.get_world_size(group), local.rows.shape[1]), columns=False)
        return made, dist.all_gather_into_tensor(made.rows, local.rows, group=group, async_op=True)


@dataclass(frozen=True)
class Quantizers:
    """The quantizers of a layer: for inputs, for weights and for gradients of the outputs."""

    recipe: Recipe
    inputs: list[Quantizer]
    weights: list[Quantizer]
    grads: list[Quantizer]


def quantizers(recipe: Recipe, products: int = 1, input_group: Any = None, grad_group: Any = None) -> Quantizers:
    """Creates the quantizers of a layer. For each product it has scales for three tensors in forward (input, weight, output) and two in
    backward, whether they are used or not. Scales of inputs or gradients that are split over ranks are equal within a group."""
    forward, backward = recipe.fp8_format.value
    ahead, back = _scales(recipe, 3 * products, True), _scales(recipe, 2 * products, False)
    delayed = recipe.delayed()
    return Quantizers(
        recipe,
        [Quantizer(forward, *one, delayed, input_group) for one in ahead[0::3]],
        [Quantizer(forward, *one, delayed, None) for one in ahead[1::3]],
        [Quantizer(backward, *one, delayed, grad_group) for one in back[0::2]],
    )


def _scales(recipe: Recipe, tensors: int, forward: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The scale and the largest value of each tensor."""
    if recipe.delayed():
        kept = histories(recipe, tensors, forward)
        return [(kept.scales[i], kept.amaxes[0][i]) for i in range(tensors)]
    return [(_number(), _number()) for _ in range(tensors)]


def _number() -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device="cuda")


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The product of two tensors whose summed dimension is the last."""
    return product8(left, right.t(), out)
