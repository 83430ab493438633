"""Plans what a call does on a platform: its kernels, and its allocations in order. The plan is a pure function of the two.

For an op without a rule, the trace may contain the kernels that the program described; otherwise the op is unknown.
"""

from __future__ import annotations

import warnings

from maya_core.hardware.platform import Platform
from maya_core.ops import attention_choice
from maya_core.ops.foreach import PREFIX, foreach
from maya_core.ops.kernel import Kernel, from_json
from maya_core.ops.packages import NAMESPACES, streamed
from maya_core.ops.registry import FORMULAS, PLANS, Plan
from maya_core.ops.triton import launched
from maya_core.ops.unknown import unknown
from maya_core.ops.work import Work
from maya_core.trace.call import Call


def find(call: Call) -> Plan | None:
    """The rule for the call: that of its overload, of its op, or of all ops of its kind."""
    plan = PLANS.get(call.op) or PLANS.get(call.name)
    if plan is not None:
        return plan
    if call.name.startswith(PREFIX):
        return foreach
    return streamed if call.name.partition("::")[0] in NAMESPACES else None


def plan(call: Call, platform: Platform) -> Work:
    """What the call does. A call for which its rule was not written is unknown."""
    if call.triton is not None:
        return launched(call, call.triton)
    if call.results and not any(tensor.numel for tensor in call.results):
        return Work()
    call = attention_choice.on(call, platform) or call
    rule = find(call)
    if rule is None:
        return Work([from_json(row) for row in call.kernels]) if call.kernels else unknown(call)
    try:
        return rule(call, platform)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        warnings.warn(
            f"maya: what {call.op} launches is not known for this call ({type(error).__name__}: {error}); its duration is estimated from its bytes alone.",
            stacklevel=2,
        )
        return unknown(call)


def kernels_of(call: Call, platform: Platform) -> list[Kernel]:
    """The kernels, copies and memsets that the call launches, in order."""
    return plan(call, platform).kernels


def flops_of(call: Call) -> int:
    """The floating-point operations of the call; a multiply-add counts as two. Attention counts every query with every key."""
    if call.triton is not None:
        return call.triton.flops
    formula = FORMULAS.get(call.op) or FORMULAS.get(call.name)
    return formula(call) if formula else call.flops
