"""Computes what a collective writes to a rank's tensors from what each rank gave. Values are host tensors; None is an unknown one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

Value = torch.Tensor | None
Values = list[Value]
Giver = Callable[[int], Values]  # returns what the rank at that place in the group gave

TO_MANY = ("broadcast", "scatter")
FROM_ONE = (*TO_MANY, "recv")


def sources(op: str, me: int, size: int, peer: int) -> range:
    """The places in the group whose values this rank receives."""
    if op in FROM_ONE:
        return range(peer, peer + 1)
    if op in ("send", "barrier") or (op in ("reduce", "gather") and me != peer):
        return range(0)
    return range(size)


def split(value: Value, sizes: list[int], ranks: int) -> Values:
    """Splits the input of an all_to_all into one part for each rank: of these sizes, in elements, or of equal sizes if there are none."""
    if value is None:
        return [None] * ranks
    flat = value.reshape(-1)
    return list(torch.split_with_sizes(flat, sizes) if sizes else flat.reshape(ranks, -1).unbind())


def outcome(op: str, me: int, size: int, peer: int, reduction: str, gave: Giver, outputs: list[torch.Tensor]) -> Values:
    """The new value of each output. In an all_to_all, what a rank gave is one part for each rank."""
    match op:
        case "broadcast" | "recv":
            return _like(gave(peer), outputs)
        case "scatter":
            return [_part(gave(peer), me)]
        case "all_reduce" | "reduce":
            if op == "reduce" and me != peer:
                return list(gave(me))
            return [_reduced([_part(gave(rank), 0) for rank in range(size)], reduction)]
        case "all_gather" | "gather":
            return [_part(gave(rank), 0) for rank in range(size)][: len(outputs)]
        case "all_gather_into_tensor":
            return [_joined([_part(gave(rank), 0) for rank in range(size)])]
        case "reduce_scatter":
            return [_reduced([_part(gave(rank), me) for rank in range(size)], reduction)]
        case "reduce_scatter_tensor":
            return [_reduced([_piece(_part(gave(rank), 0), me, size) for rank in range(size)], reduction)]
        case "all_to_all":
            # A rank that is assumed to do what this one does sends back as much as it receives, so loads stay balanced.
            parts = [_part(gave(rank), rank if gave(rank) is gave(me) else me) for rank in range(size)]
            return parts if len(outputs) == size else [_joined(parts)]
    return [None] * len(outputs)


def _like(values: Values, outputs: list[torch.Tensor]) -> Values:
    return [
        value if value is not None and value.numel() == output.numel() else None
        for value, output in zip(values or [None] * len(outputs), outputs, strict=False)
    ]


def _part(values: Values, index: int) -> Value:
    return values[index] if index < len(values) else None


def _piece(value: Value, index: int, pieces: int) -> Value:
    if value is None or value.numel() % pieces:
        return None
    return value.reshape(pieces, -1)[index]


def _joined(values: Values) -> Value:
    known = [value.reshape(-1) for value in values if value is not None]
    return torch.cat(known) if len(known) == len(values) else None


def _reduced(values: Values, reduction: str) -> Value:
    """Reduces all values. Ranks that are not emulated are represented by the same tensor object, whose repetitions are computed at once."""
    if any(value is None for value in values):
        return None
    times = Counter(id(value) for value in values)
    distinct = {id(value): value for value in values if value is not None}
    result: Value = None
    for key, value in distinct.items():
        one = _repeated(value, times[key], reduction)
        result = one if result is None else _combined(result, one, reduction)
    if result is not None and reduction == "avg":
        result = result / len(values)
    return result


def _repeated(value: torch.Tensor, times: int, reduction: str) -> Value:
    if reduction in ("sum", "avg"):
        return value.clone() if value.dtype == torch.bool else value * times
    if reduction == "product":
        return value**times
    if reduction == "bxor":
        return value.clone() if times % 2 else value ^ value
    return value.clone() if reduction in ("min", "max", "band", "bor") else None


def _combined(a: torch.Tensor, b: Value, reduction: str) -> Value:
    if b is None or a.shape != b.shape:
        return None
    match reduction:
        case "sum" | "avg":
            return a | b if a.dtype == torch.bool else a + b
        case "product":
            return a * b
        case "min":
            return torch.minimum(a, b)
        case "max":
            return torch.maximum(a, b)
        case "band":
            return a & b
        case "bor":
            return a | b
        case "bxor":
            return a ^ b
    return None
