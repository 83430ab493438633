"""Ops without a description: one kernel that moves the op's bytes, which is a lower bound. The prediction lists such ops by name, so that a
reader knows what to describe or to measure.
"""

from __future__ import annotations

from maya_core.ops.kernel import Unknown
from maya_core.ops.traffic import moved
from maya_core.ops.work import Work
from maya_core.trace.call import Call


def unknown(call: Call, flops: float = 0.0) -> Work:
    """The work of an op that was not measured; `flops` where its arithmetic is known."""
    results = call.results or call.inputs[:1]
    read, written = sum(map(moved, call.inputs)), sum(map(moved, results))
    elements = max((result.numel for result in results), default=1)
    double = int(any(each.dtype in ("Double", "ComplexDouble") for each in call.inputs[:1]))
    return Work().launch(Unknown(call.name, read, written, elements, flops, double))
