"""Rules for the results of ops that torch's Meta kernels cannot describe: sizes that depend on values, cuDNN's own formats, sparse layouts.

There are three kinds of rules, by what decides the result:

- `@describe` is a Meta kernel that torch lacks, or that replaces one of torch's that does not know what cuDNN does. It gets
  tensors without data and is called once for each new call, so it costs nothing on the hot path. Prefer it.
- `@rule` is called every time, with the tensors on the emulated device. It is for results that depend on values, or that
  share memory in ways that metadata cannot express. It makes its outputs with ordinary torch calls, fills in values where
  it knows them, and records the kernel.
- `@sparse_rule`, `@compressed_rule` and `@nested_rule` are such rules for tensors of another layout: COO, CSR and nested.

In addition, `@autocast_rule` says what autocast does to an op for which only a CUDA build of torch has a cast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

from maya_core.ops.lazy_torch import torch
from maya_core.torch_seam import dispatcher

LARGEST_ON_HOST = 2**20  # elements: the native device remembers no more of a tensor that is not uniform

_RULES: dict[str, Callable[..., Any]] = {}
_DESCRIPTIONS: dict[str, Callable[..., Any]] = {}
_SPARSE_RULES: dict[str, Callable[..., Any]] = {}
_COMPRESSED_RULES: dict[str, Callable[..., Any]] = {}
_NESTED_RULES: dict[str, Callable[..., Any]] = {}
_AUTOCAST_RULES: dict[str, Callable[..., Any]] = {}

_IN_USE: list[Rules] = []

_Register = Callable[[Callable[..., Any]], Callable[..., Any]]


def _registers(table: dict[str, Callable[..., Any]], ops: Sequence[str]) -> _Register:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            table[op] = function
        return function

    return register


def rule(*ops: str) -> _Register:
    """Registers a rule for ops, named like 'aten::nonzero' or 'aten::nonzero.out'. Its first argument is `Rules`.

    A program may add rules while it is being emulated, before it first calls the op.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _RULES[op] = function
            for rules in _IN_USE:
                rules.table[op] = rules._bind(function)
        return function

    return register


def describe(*ops: str) -> _Register:
    """Registers a Meta kernel for ops of ATen. Keyword-only arguments of the op, such as `out`, are passed by keyword."""
    return _registers(_DESCRIPTIONS, ops)


def sparse_rule(*ops: str) -> _Register:
    """Registers a rule for ops on sparse COO tensors. The first argument is `Rules`; keyword-only arguments are passed by keyword."""
    return _registers(_SPARSE_RULES, ops)


def compressed_rule(*ops: str) -> _Register:
    """Registers a rule for ops on compressed sparse tensors, such as CSR, like `sparse_rule`."""
    return _registers(_COMPRESSED_RULES, ops)


def nested_rule(*ops: str) -> _Register:
    """Registers a rule for ops on strided nested tensors, like `sparse_rule`."""
    return _registers(_NESTED_RULES, ops)


def autocast_rule(*ops: str) -> _Register:
    """Registers a function that replaces the op under torch.autocast("cuda"). It gets the op's arguments and is differentiated as usual."""
    return _registers(_AUTOCAST_RULES, ops)


def _library(key: str, functions: dict[str, Callable[..., Any]]) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that kernels are overridden, which is intended
        for op, function in functions.items():
            library.impl(op.removeprefix("aten::"), function, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def without_autocast() -> AbstractContextManager[object]:
    return dispatcher.excluding("AutocastCPU", "AutocastCUDA")


def as_on_cpu(name: str) -> Callable[..., Any]:
    """The kernel of an op that has one implementation for CPU and CUDA, made of other ops only."""

    def run(rules: Rules, *arguments: Any) -> Any:
        op = dispatcher.overload(name)
        schema = dispatcher.schema(op).arguments
        positional = [a for a in schema if not a.kwarg_only]
        options = dict(zip((a.name for a in schema if a.kwarg_only), arguments[len(positional) :], strict=True))
        return op.redispatch(dispatcher.keys("CPU"), *arguments[: len(positional)], **options)

    return run


def _csr_as_on_cpu(name: str) -> Callable[..., Any]:
    """The kernel of an op on CSR tensors that has one implementation for CPU and CUDA, made of other ops."""
    op, key = dispatcher.overload(name), dispatcher.keys("SparseCsrCPU")
    return lambda *arguments, **options: op.redispatch(key, *arguments, **options)


class Reading(NamedTuple):
    """The value of a device tensor, on the host."""

    value: torch.Tensor
    made_up: bool  # whether it rests on values that nobody knows
    routed: bool = False  # whether these are only choices of a router, which are assumed to be spread evenly


class UnknownSizes:
    """What is done when a size depends on a value that nobody knows. Here nothing; recording/unknown_values.py tells it to the user."""

    share = 0.5  # what is kept of a mask that is too large even for a sample

    def told(self, how: str, tensor: torch.Tensor, found: Reading | None) -> Reading | None:
        """`how` it is read (UnknownRead), and what was found to stand for the value. Returns what to take instead, if there is something better."""
        return None


class Rules:
    """What a rule can do with the device."""

    def __init__(self, native: ModuleType, compressed_ops: Sequence[str]) -> None:
        """`compressed_ops` are the ops on CSR tensors that have one implementation for CPU and CUDA."""
        self._native = native
        self.unknown = UnknownSizes()
        self.table = {op: self._bind(function) for op, function in _RULES.items()}  # as the native device calls them
        _IN_USE.append(self)
        compressed = {op: self._bind(function) for op, function in _COMPRESSED_RULES.items()}
        self._libraries = [
            _library("Meta", _DESCRIPTIONS),
            _library("AutocastCUDA", _AUTOCAST_RULES),
            _library("SparseCUDA", {op: self._bind(function) for op, function in _SPARSE_RULES.items()}),
            _library("NestedTensorCUDA", {op: self._bind(function) for op, function in _NESTED_RULES.items()}),
            _library("SparseCsrCUDA", {f"aten::{op}": _csr_as_on_cpu(op) for op in compressed_ops} | compressed),
        ]

    def close(self) -> None:
        """Removes the kernels."""
        if self in _IN_USE:
            _IN_USE.remove(self)
        for library in self._libraries:
            dispatcher.remove(library)
        self._libraries.clear()

    @staticmethod
    def composed(sparse_ops: list[str], nested_ops: list[str]) -> tuple[list[str], list[str]]:
        """Those of the ops without a rule, which torch's own composition runs."""
        return (
            [op for op in sparse_ops if f"aten::{op}" not in _SPARSE_RULES],
            [op for op in nested_ops if f"aten::{op}" not in _NESTED_RULES],
        )

    def _bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            # As inside any kernel, nothing is differentiated or cast.
            with dispatcher.below_autograd(), without_autocast():
                return function(self, *arguments, **options)

        return call

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's true value on the host, if it is known and small enough to compute with at every call."""
        if not tensor.is_cuda:
            return tensor
        return self._native.host_value(tensor) if tensor.numel() <= LARGEST_ON_HOST else None

    def read(self, tensor: torch.Tensor, how: str = "size") -> Reading | None:
        """The tensor's value, of any size, for a result whose size depends on it; or what stands for a value that nobody knows, which is
        told to the user unless `how` is empty. None: the tensor is too large for a sample."""
        if not tensor.is_cuda:
            return Reading(tensor, False)
        found = self._native.read_value(tensor)
        if found is not None and (not found[1] or not how):
            return Reading(*found)
        better = self.unknown.told(how, tensor, found and Reading(*found)) if how else None
        if better is None:
            return found and Reading(*found)
        self._native.remember(tensor, better.value, better.made_up)
        return better

    def remember(self, tensor: torch.Tensor, host: torch.Tensor, made_up: bool = False) -> torch.Tensor:
        """Records that the device tensor has these values, which are `made_up` if they rest on some that nobody knows."""
        self._native.remember(tensor, host, made_up)
        return tensor

    def forget(self, tensor: torch.Tensor) -> None:
        """Records that the values of the device tensor are unknown."""
        self._native.forget(tensor)

    def put(self, host: torch.Tensor, device: torch.device, made_up: bool = False) -> torch.Tensor:
        """A new device tensor with these values."""
        made = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        return self.remember(made, host, made_up)

    def follow(self, op: str, arguments: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Records that the outputs have the values that the op gives on the host. They are computed when something reads them."""
        self._native.follow(op, list(arguments), list(outputs))

    def on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of the function for the true values of the arguments; None if one of them is unknown."""
        values = [self.value(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        if any(value is None and argument is not None for value, argument in zip(values, arguments, strict=True)):
            return None
        return function(*values)

    def record(self, op: str, arguments: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Records the op's kernels on the current stream."""
        self._native.record_call(op, list(arguments), list(outputs))

    def wait(self, tensor: torch.Tensor) -> None:
        """Makes the host wait for the tensor's stream, as an op does that must know a size before it can allocate."""
        self._native.synchronize_current_stream(tensor.get_device())


def no_rule_message(op: str, reason: str, where: str = "") -> str:
    """The message for an op that neither torch's Meta kernel nor a rule describes."""
    place = f", called in {where}" if where else ""
    why = reason.splitlines()[0] if reason else "no reason given"
    return (
        f"Maya has no rule for {op}{place}: torch's Meta kernel cannot describe its result ({why}). "
        f"To add one, write a function decorated with @maya_core.ops.rule('{op}') that returns the op's outputs "
        "as empty tensors of the right shape, before the op is first called; `maya help extending` shows an example."
    )
