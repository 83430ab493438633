"""Rules for ops whose result Meta kernels cannot tell: sizes that depend on values, cuDNN's own formats, sparse layouts.

A rule is a Python function with the op's arguments (real tensors on the emulated device) that returns what the op
returns. It makes its outputs with ordinary torch calls, fills in values where it knows them (`Rules.value`,
`Rules.remember`) and records the kernel with `Rules.record`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

_RULES: dict[str, Callable[..., Any]] = {}


def rule(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a rule for ops named as 'aten::nonzero' or 'aten::unique_dim.overload'. The first argument the rule gets is `Rules`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _RULES[op] = function
        return function

    return register


class Rules:
    """What a rule can ask of the device."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def table(self) -> dict[str, Callable[..., Any]]:
        """Op name to callable, as the native device calls it."""

        def bind(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                # we are below autograd already: nothing a rule does is differentiated
                with torch._C._AutoDispatchBelowAutograd():
                    return function(self, *arguments)

            return call

        return {op: bind(function) for op, function in _RULES.items()}

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's true value on the host, if it is known."""
        return self._native.host_value(tensor)

    def remember(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """Says that the device tensor holds these values."""
        self._native.remember(tensor, host)
        return tensor

    def record(self, op: str, arguments: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Puts the kernel on the current stream."""
        self._native.record_call(op, list(arguments), list(outputs))


def no_rule_message(op: str, reason: str) -> str:
    """What the user reads where an op can neither be described by torch's Meta kernel nor by a rule."""
    return (
        f"Maya has no rule for {op}: torch's Meta kernel cannot describe its result ({reason.splitlines()[0] if reason else 'no reason given'}). "
        f"To add one, write a function decorated with @maya_core.device.rules.rule('{op}') that returns the op's outputs "
        "as empty tensors of the right shape and call it before training; docs/extending.md shows an example."
    )
