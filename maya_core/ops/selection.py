"""Ops whose result size depends on values: nonzero, masked_select, unique, bincount, repeat_interleave. Kernels follow Nonzero.cu, Unique.cu
and SummaryOps.cu of ATen/native/cuda.

The size is computed from the values, or from the sample that stands for values that nobody knows; the user is told of the latter. Only for
tensors that are too large even for that, it is guessed: half of a mask is kept, all elements are distinct, and each is repeated once.

On a GPU, all of these make the host wait, because it must know the size before it can allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maya_core.hardware.platform import Platform
from maya_core.ops.elementwise import one_kernel
from maya_core.ops.kernel import Copy, Streaming, small
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op
from maya_core.ops.rules import Rules, rule
from maya_core.ops.traffic import moved, streaming
from maya_core.ops.work import Work
from maya_core.trace.call import Call


# ---- kernels ----
@op(*aten("nonzero", "masked_select"))
def compacted(call: Call, platform: Platform) -> Work:
    """Counts, copies the count to the host, and compacts; nonzero then splits the positions by dimension (Nonzero.cu)."""
    source = call.inputs[-1]
    read, written = sum(map(moved, call.inputs)), sum(map(moved, call.results))
    work = Work().launch(
        Streaming("reduction", source.nbytes, 1024, source.numel, source.numel), small(), Copy("d2h", 4), small(1024),
        Streaming("scan", read, written, source.numel),
    )  # fmt: skip
    if call.name == "aten::nonzero":
        work.launch(Streaming("elementwise", written, written, sum(result.numel for result in call.results)))
    return work


@op("aten::_unique2")
def unique(call: Call, platform: Platform) -> Work:
    source = call.inputs[0]
    sort = streaming("sort", [source], [source])
    return Work().launch(
        sort, sort, streaming("scan", [source], [source]), streaming("gather", [source], call.results[:1])
    )


@op(*aten("_unique", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "nonzero_static"))
def selected(call: Call, platform: Platform) -> Work:
    return Work().launch(*one_kernel(None, call.inputs, call.results or call.inputs[:1]))


@op("aten::bincount")
def bincount(call: Call, platform: Platform) -> Work:
    """Copies the smallest and largest value to the host, then counts."""
    source = call.inputs[0]
    work = Work()
    for _ in ("smallest", "largest"):
        work.temporary(source.itemsize)
        work.launch(Streaming("reduction", source.nbytes, 8, source.numel, source.numel), Copy("d2h", 8))
    return work.out(0).launch(Streaming("scatter", source.nbytes, sum(map(moved, call.results)), source.numel))


@op("aten::histc")
def histc(call: Call, platform: Platform) -> Work:
    return Work().launch(streaming("fill", [], call.results), streaming("scatter", [call["self"]], call.results))


# ---- results ----
def _count_nonzero(rules: Rules, mask: torch.Tensor) -> int:
    """How many elements are not zero."""
    found = rules.read(mask, "mask")
    if found is None:
        return int(mask.numel() * rules.unknown.share)
    return int(found.value.count_nonzero())


@rule("aten::nonzero")
def nonzero(rules: Rules, self: torch.Tensor) -> torch.Tensor:
    count = _count_nonzero(rules, self)
    rules.wait(self)
    out = torch.empty(
        (self.dim(), count), dtype=torch.int64, device=self.device
    ).t()  # CUDA writes one row per dimension
    rules.record("aten::nonzero", [self], [out])
    rules.follow("aten::nonzero", [self], [out])
    return out


def _into(rules: Rules, out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Writes the result of an op's functional form to `out`."""
    out.resize_(result.shape)
    out.copy_(result)
    return out


@rule("aten::nonzero.out")
def nonzero_out(rules: Rules, self: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return _into(rules, out, nonzero(rules, self))


@rule("aten::masked_select")
def masked_select(rules: Rules, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    self, mask = torch.broadcast_tensors(self, mask)  # type: ignore[no-untyped-call]
    count = _count_nonzero(rules, mask)
    rules.wait(mask)
    out = torch.empty(count, dtype=self.dtype, device=self.device)
    rules.record("aten::masked_select", [self, mask], [out])
    rules.follow("aten::masked_select", [self, mask], [out])
    return out


@rule("aten::masked_select.out")
def masked_select_out(rules: Rules, self: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return _into(rules, out, masked_select(rules, self, mask))


# ---- unique ----
def _unique(
    rules: Rules,
    op: str,
    arguments: list[Any],
    on_host: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    dim: int | None,
    with_inverse: bool,
    with_counts: bool,
) -> tuple[torch.Tensor, ...]:
    self = arguments[0]
    if (found := rules.read(self, "distinct")) is not None:
        made = tuple(rules.put(host, self.device, found.made_up) for host in on_host(found.value))
    else:  # all are taken for distinct
        along = self.numel() if dim is None else self.size(dim)
        made = (
            torch.empty(along if dim is None else self.shape, dtype=self.dtype, device=self.device),
            torch.empty(
                (self.shape if dim is None else along) if with_inverse else 0, dtype=torch.int64, device=self.device
            ),
            torch.empty(along if with_counts else 0, dtype=torch.int64, device=self.device),
        )
    rules.wait(self)
    rules.record(op, arguments, made)
    return made


@rule("aten::_unique")
def unique_rule(rules: Rules, self: torch.Tensor, sorted: bool, inverse: bool) -> tuple[torch.Tensor, ...]:
    # The GPU finds unique values by sorting them, whether or not sorting is requested.
    def on_host(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._unique2(value, True, inverse, False)  # type: ignore[no-any-return]

    return _unique(rules, "aten::_unique", [self, sorted, inverse], on_host, None, inverse, False)[:2]


@rule("aten::_unique2")
def unique2(rules: Rules, self: torch.Tensor, sorted: bool, inverse: bool, counts: bool) -> tuple[torch.Tensor, ...]:
    def on_host(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._unique2(value, True, inverse, counts)  # type: ignore[no-any-return]

    return _unique(rules, "aten::_unique2", [self, sorted, inverse, counts], on_host, None, inverse, counts)


@rule("aten::unique_dim")
def unique_dim(
    rules: Rules, self: torch.Tensor, dim: int, sorted: bool, inverse: bool, counts: bool
) -> tuple[torch.Tensor, ...]:
    def on_host(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.unique_dim(value, dim, True, True, True)  # type: ignore[no-any-return]

    return _unique(rules, "aten::unique_dim", [self, dim, sorted, inverse, counts], on_host, dim, True, True)


@rule("aten::unique_consecutive")
def unique_consecutive(
    rules: Rules, self: torch.Tensor, inverse: bool, counts: bool, dim: int | None
) -> tuple[torch.Tensor, ...]:
    def on_host(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.unique_consecutive(value, inverse, counts, dim)  # type: ignore[no-any-return]

    return _unique(rules, "aten::unique_consecutive", [self, inverse, counts, dim], on_host, dim, inverse, counts)


@rule("aten::unique_dim_consecutive")
def unique_dim_consecutive(
    rules: Rules, self: torch.Tensor, dim: int, inverse: bool, counts: bool
) -> tuple[torch.Tensor, ...]:
    def on_host(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.unique_dim_consecutive(value, dim, True, True)  # type: ignore[no-any-return]

    return _unique(rules, "aten::unique_dim_consecutive", [self, dim, inverse, counts], on_host, dim, True, True)


# ---- counting and repeating ----
@rule("aten::bincount")
def bincount_rule(rules: Rules, self: torch.Tensor, weights: torch.Tensor | None, minlength: int) -> torch.Tensor:
    rules.wait(self)
    found = rules.read(self, "" if minlength else "largest")  # with a minimum, the program says how many there are
    bins = minlength or self.numel()
    if found is not None:
        bins = max(minlength, int(found.value.max()) + 1) if self.numel() else minlength
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    out = torch.empty(bins, dtype=dtype, device=self.device)
    rules.record("aten::bincount", [self, weights, minlength], [out])
    rules.follow("aten::bincount", [self, weights, minlength], [out])
    return out


@rule("aten::repeat_interleave.Tensor")
def repeat_interleave(rules: Rules, repeats: torch.Tensor, output_size: int | None) -> torch.Tensor:
    size = output_size
    if size is None:
        found = rules.read(repeats, "sum")
        size = repeats.numel() if found is None else int(found.value.sum())
        rules.wait(repeats)
    out = torch.empty(size, dtype=repeats.dtype, device=repeats.device)
    rules.record("aten::repeat_interleave.Tensor", [repeats, output_size], [out])
    rules.follow("aten::repeat_interleave.Tensor", [repeats, output_size], [out])
    return out
