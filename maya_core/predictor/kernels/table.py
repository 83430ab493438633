"""From a signature to its kernels: the chain of its op, made as long as the device counted."""

from __future__ import annotations

from maya_core.device.kernels.call import Signature
from maya_core.predictor.kernels import (  # noqa: F401  they register their chains
    attention,
    convolution,
    indexing,
    lists,
    pointwise,
    products,
    recipes,
    recurrent,
    reductions,
    rows,
    sorting,
)
from maya_core.predictor.kernels.kernel import CHAINS, Kernel, Op, helper
from maya_core.predictor.kernels.lists import foreach
from maya_core.predictor.kernels.pointwise import elementwise
from maya_core.predictor.kernels.triton import triton

LARGE = 2**30  # bytes from which ops over more than 2^31 bytes or elements are done in parts


def kernels_of(signature: Signature) -> list[Kernel]:
    """The kernels, copies and memsets that the call launches, in order: as many as `signature.launches`."""
    if not signature.launches:
        return []
    if signature.kernel is not None:
        return triton(signature)
    op = Op(signature)
    chain = CHAINS.get(op.name)
    if chain is None:
        chain = foreach if op.name.startswith("_foreach_") else elementwise
    try:
        found = chain(op)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError):
        found = elementwise(op)  # a call of a kind that the table's author did not think of, counted as the default is
    return found if len(found) == signature.launches else _settle(found, signature.launches)


def _weight(kernel: Kernel) -> float:
    return sum(kernel.sizes[:2]) if kernel.family == "memory" else float("inf")


def _settle(kernels: list[Kernel], launches: int) -> list[Kernel]:
    """Short chains had their largest kernel in parts, or helpers before it; of long ones the smallest launches were joined."""
    kernels = list(kernels) or [helper()]
    largest = max(range(len(kernels)), key=lambda i: (_weight(kernels[i]) < float("inf"), _weight(kernels[i])))
    missing = launches - len(kernels)
    if missing > 0 and LARGE <= _weight(kernels[largest]) < float("inf"):
        whole = kernels[largest]
        part = whole._replace(sizes=(*(size / (missing + 1) for size in whole.sizes[:3]), *whole.sizes[3:]))
        kernels[largest : largest + 1] = [part] * (missing + 1)
    elif missing > 0:
        kernels[largest:largest] = [helper()] * missing
    while len(kernels) > launches:
        kernels.remove(min(kernels, key=_weight))
    return kernels
