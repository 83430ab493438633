"""Where ops are described: under their full name, `aten::native_layer_norm`, or with an overload where that alone is meant,
`aten::pow.Scalar`. Two ops of one name in two namespaces never meet.

`@op` says which kernels a call launches and what memory it takes on the way, `@flops` how many operations it is, `values` what
becomes of values on the device. What comes out of an op where torch's Meta kernel cannot say is in `rules`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from maya_core.hardware.platform import Platform
from maya_core.ops.work import Work
from maya_core.trace.call import Call

Plan = Callable[[Call, Platform], Work]
Formula = Callable[[Call], int]

PLANS: dict[str, Plan] = {}
FORMULAS: dict[str, Formula] = {}


def op(*names: str, flops: Formula | None = None) -> Callable[[Plan], Plan]:
    """Registers what ops do on a platform, and their floating-point operations, a multiply-add being two."""

    def register(plan: Plan) -> Plan:
        for name in names:
            if "::" not in name:
                raise ValueError(f"{name!r} is not the full name of an op: give namespace::name")
            PLANS[name] = plan
            if flops is not None:
                FORMULAS[name] = flops
        return plan

    return register


class Assume(enum.IntEnum):
    """What is taken to come out of an op whose inputs nobody knows. The native device is given these by name at install."""

    NOTHING = 0
    ALL_FINITE = 1
    TRUE = 2
    FALSE = 3
    RANDOM_INDICES = 4
    SAME_IS_EQUAL = 5
    COMPARE_INFINITY = 6


@dataclass
class Values:
    """How an op treats values, as far as its schema and torch's tags do not say."""

    assume: Assume = Assume.NOTHING
    only_writes: bool = False  # the first argument is written and not read
    keeps_uniform: bool = False  # of a tensor with one value everywhere, so is the result
    heavy: bool = (
        False  # multiplies: too much for the host but for tiny tensors, and torch's switches decide its kernel
    )
    mixes_devices: bool = False  # takes tensors of the host beside those of the device


VALUES: dict[str, Values] = {}


def values(*names: str, assume: Assume | None = None, only_writes: bool = False, keeps_uniform: bool = False,
           heavy: bool = False, mixes_devices: bool = False) -> None:  # fmt: skip
    """Says of ops, by their name without overload, how they treat values; what was said before stays."""
    for name in names:
        known = VALUES.setdefault(name, Values())
        known.assume = known.assume if assume is None else assume
        known.only_writes |= only_writes
        known.keeps_uniform |= keeps_uniform
        known.heavy |= heavy
        known.mixes_devices |= mixes_devices


def aten(*names: str) -> tuple[str, ...]:
    """Full names of ATen's ops."""
    return tuple(f"aten::{name}" for name in names)
