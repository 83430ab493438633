"""FP8 tensors with a scale for each block: 128 numbers of a row or column, 128 x 128 of a weight (Float8BlockScaling), or 32 numbers in
Blackwell's own format (MXFP8). Rows and columns are quantized separately. Follows
transformer_engine/pytorch/tensor/{float8_blockwise_tensor,mxfp8_tensor}.py and distributed.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from maya_megatron.engine.device import launch
from maya_megatron.engine.precision import Recipe
from maya_megatron.engine.quantized import Quantized, Quantizer, Quantizers

BLOCK = 128


def _blocks(size: int, of: int = BLOCK) -> int:
    return -(-size // of)


def _up(size: int, multiple: int) -> int:
    return _blocks(size, multiple) * multiple


# The sizes of the scales of rows and columns for a tensor of shape (m, k): get_scale_shape of each quantizer
def of_lines(m: int, k: int) -> Any:
    return (_blocks(k), _up(m, 4)), (_blocks(m), _up(k, 4))


def of_squares(m: int, k: int) -> Any:
    return (_blocks(m), _up(_blocks(k), 4)), (_blocks(k), _up(_blocks(m), 4))


def of_mx(m: int, k: int) -> Any:
    return (_up(m, 128), _up(_blocks(k, 32), 4)), (_up(_blocks(m, 32), 4), _up(k, 128))


class BlockQuantizer(Quantizer):
    columns_gather = True
    delayed = False

    def __init__(self, dtype: torch.dtype, scales: Callable[[int, int], Any], transposed: bool) -> None:
        self.dtype, self.scales, self.transposed = dtype, scales, transposed
        self.scale_dtype = torch.uint8 if scales is of_mx else torch.float32

    def empty(self, shape: Any, columns: bool, rows: bool = True) -> Quantized:
        of_rows, of_columns = self.scales(*shape)
        made = Quantized(None, None, None)
        if rows:
            made.rows, made.scale = self._new(shape), self._scale(of_rows)
        if columns:
            # MXFP8 does not change their layout.
            made.columns = self._new(shape[::-1]) if self.transposed else self._new(shape).t()
            made.scale_of_columns = self._scale(of_columns)
        return made

    def _new(self, shape: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device="cuda")

    def _scale(self, shape: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=self.scale_dtype, device="cuda")

    def fill(self, made: Quantized, x: torch.Tensor, amax_known: bool = False) -> None:
        if x.numel():
            launch("quantize_blocks", [x], [one for one in made.parts() if one is not None])

    def gathered(self, local: Quantized, group: Any, columns: bool) -> Quantized:
        made, finish = self._all(local, group, rows=True, columns=columns, wait=True)
        finish()
        return made

    def gathering(self, local: Quantized, group: Any) -> tuple[Quantized, Any]:
        made, finish = self._all(local, group, rows=False, columns=True, wait=False)
        return made, _Arriving(finish)

    def _all(self, local: Quantized, group: Any, rows: bool, columns: bool, wait: bool) -> tuple[Quantized, Any]:
        """Columns are sent in their present layout and transposed after they arrive."""
        features, tokens = (local.columns if local.rows is None else local.rows.t()).shape
        shape = (tokens * dist.get_world_size(group), features)
        made = Quantized(None, None, None)
        works: list[Any] = []
        if rows:
            made.rows, made.scale = (self._whole(one, group, wait, works) for one in (local.rows, local.scale))
            made.rows = made.rows.view(shape)
        if columns:
            lying = local.columns if local.columns.is_contiguous() else local.columns.t()
            made.columns, made.scale_of_columns = (
                self._whole(one, group, wait, works) for one in (lying, local.scale_of_columns)
            )

        def finish() -> None:
            for work in works:
                work.wait()
            if columns and self.transposed:
                whole, made.columns = made.columns, self._new(shape[::-1])
                launch("fp8_transpose", [whole], [made.columns])
            elif columns:
                made.columns = made.columns.view(shape).t()

        return made, finish

    def _whole(self, part: torch.Tensor, group: Any, wait: bool, works: list[Any]) -> torch.Tensor:
        out = torch.empty(part.numel() * dist.get_world_size(group), dtype=part.dtype, device=part.device)
        work = dist.all_gather_into_tensor(out, part.view(-1), group=group, async_op=not wait)
        if work is not None:
            works.append(work)
        return out


class _Arriving:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


def quantizers(recipe: Recipe, products: int) -> Quantizers:
    forward, backward = recipe.fp8_format.value
    of_tensors, of_weights, transposed = (of_mx, of_mx, False) if recipe.mxfp8() else (of_lines, of_squares, True)

    def some(dtype: torch.dtype, scales: Callable[[int, int], Any]) -> list[Any]:
        return [BlockQuantizer(dtype, scales, transposed) for _ in range(products)]

    return Quantizers(recipe, some(forward, of_tensors), some(forward, of_weights), some(backward, of_tensors))
