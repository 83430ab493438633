"""The registry of op descriptions, by full name: `aten::native_layer_norm`, or `aten::pow.Scalar` for one overload only. Ops with the same
name in two namespaces are different ops.

`@op` registers the kernels and allocations of a call, and with `flops` its floating-point operations. `values` declares how an op treats
values on the device. Results that torch's Meta kernel cannot describe are in `rules`.
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
    """Registers what ops do on a platform, and their floating-point operations; a multiply-add counts as two."""

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
    """What is assumed about the result of an op whose inputs are unknown. The native device receives these at install."""

    NOTHING = 0
    ALL_FINITE = 1
    TRUE = 2
    FALSE = 3
    RANDOM_INDICES = 4
    SAME_IS_EQUAL = 5
    COMPARE_INFINITY = 6


class Sample(enum.IntEnum):
    """The numbers that stand for results that nobody knows: around 0, above 0, between 0 and 1, above 0 if all inputs are, or below 0."""

    ANY = 0
    POSITIVE = 1
    UNIT = 2
    AS_INPUTS = 3
    NEGATIVE = 4


@dataclass
class Values:
    """How an op treats values, where its schema and torch's tags do not say it."""

    assume: Assume = Assume.NOTHING
    sample: Sample = Sample.ANY
    only_writes: bool = False  # the first argument is written and not read
    keeps_uniform: bool = False  # if an input has one value everywhere, so has the result
    heavy: bool = False  # a matrix product or the like: its cost is not that of its elements, and torch's switches decide its kernel
    mixes_devices: bool = False  # accepts host tensors together with device tensors


VALUES: dict[str, Values] = {}


def values(*names: str, assume: Assume | None = None, sample: Sample | None = None, only_writes: bool = False,
           keeps_uniform: bool = False, heavy: bool = False, mixes_devices: bool = False) -> None:  # fmt: skip
    """Declares how ops treat values, by their names without overload. Earlier declarations stay."""
    for name in names:
        known = VALUES.setdefault(name, Values())
        known.assume = known.assume if assume is None else assume
        known.sample = known.sample if sample is None else sample
        known.only_writes |= only_writes
        known.keeps_uniform |= keeps_uniform
        known.heavy |= heavy
        known.mixes_devices |= mixes_devices


def aten(*names: str) -> tuple[str, ...]:
    """The full names of ops of ATen."""
    return tuple(f"aten::{name}" for name in names)
