"""Finds the kernels that a call in a profiler trace should launch.

The trace contains the name of an op without its overload and, for each argument, its type, dims, strides and, for numbers, the value.
The overload is found from these. The call is then repeated on an emulated GPU of the same kind, whose record shows the kernels.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from maya_core.device.emulated import EmulatedDevice
from maya_core.device.op_table import cuda_ops
from maya_core.hardware.catalog import Gpu
from maya_core.ops.kernel import Kernel
from maya_core.ops.plan import kernels_of
from maya_core.torch_seam.dispatcher import schema
from maya_core.trace.schema import EVENT, EventKind

# C++ names of element types, as compilers write them.
DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16,
    "bool": torch.bool, "unsigned char": torch.uint8, "signed char": torch.int8, "char": torch.int8,
    "short": torch.int16, "short int": torch.int16, "int": torch.int32, "long": torch.int64, "long int": torch.int64,
    "long long": torch.int64, "c10::complex<float>": torch.complex64, "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
    "unsigned short": torch.uint16, "unsigned int": torch.uint32, "unsigned long": torch.uint64,
}  # fmt: skip
# c10::ScalarType, by number
SCALAR_TYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, None,
    torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16,
)  # fmt: skip
MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
NUMBERS = (torch.float64, torch.int64, torch.bool)  # dtypes of Python numbers next to a tensor
RECORDED = ("List[Tensor]", "int", "float", "bool", "number")  # kinds of arguments that are always recorded
WHOLE = ("copy_",)  # one op for the device, although it has no CUDA kernel of its own
# How kernel names refer to dtypes; the first match counts
ELEMENTS = (
    ("BFloat16", torch.bfloat16), ("bf16", torch.bfloat16), ("Half", torch.float16), ("OpaqueType<2", torch.bfloat16),
    ("OpaqueType<4", torch.float32), ("OpaqueType<8", torch.int64), ("OpaqueType<1", torch.uint8),
    ("float", torch.float32), ("double", torch.float64), ("long", torch.int64),
)  # fmt: skip


class UnknownCall(Exception):
    """The trace does not contain enough to repeat a call. The message is the reason, by which such calls are counted."""


NO_VALUES = "have arguments whose values are not in the trace"
NO_OVERLOAD = "belong to ops of another version of torch, or of other libraries"
NO_LIST_DTYPE = "have lists of tensors of unknown dtype"
NOT_REPEATED = "belong to calls that the emulated GPU cannot repeat"


@dataclass(frozen=True)
class RecordedCall:
    """A distinct call. Dims and strides are tuples; for lists of tensors, tuples of tuples."""

    name: str  # aten::mm
    types: tuple[str, ...]
    dims: tuple[Any, ...]
    strides: tuple[Any, ...] | None  # None: not recorded
    values: tuple[str, ...] | None  # None: not recorded
    copies: str = ""  # HtoD or DtoH, if the call copies in that direction
    elements: torch.dtype | None = None  # the dtype of lists of tensors, from the names of the kernels

    @staticmethod
    def of(name: str, args: dict[str, Any], copies: str = "", kernel_names: tuple[str, ...] = ()) -> RecordedCall:
        types = tuple(str(each) for each in args["Input type"])
        listed = "TensorList" in types
        strides = args.get("Input Strides")
        values = args.get("Concrete Inputs")
        return RecordedCall(
            name,
            types,
            _frozen(args.get("Input Dims", args.get("Input dims"))),
            _frozen(strides) if strides is not None else None,
            tuple(str(each) for each in values) if values is not None else None,
            copies,
            elements_of(kernel_names) if listed else None,
        )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def elements_of(kernel_names: tuple[str, ...]) -> torch.dtype | None:
    names = " ".join(kernel_names)
    return next((dtype for part, dtype in ELEMENTS if part in names), None)


@functools.cache
def _on_device() -> frozenset[str]:
    return frozenset(cuda_ops()) | frozenset(WHOLE)


@functools.cache
def overload(name: str, types: tuple[str, ...]) -> tuple[Any, bool] | None:
    """The overload that accepts these arguments, and whether it is one op for the GPU. Such overloads are preferred."""
    base = name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, base, None) if base.isidentifier() else None
    if packet is None or not name.startswith("aten::"):
        return None
    found = []
    for which in packet.overloads():
        each = getattr(packet, which)
        if _takes(each, types):
            full = base if which == "default" else f"{base}.{which}"
            undefined = sum(
                given == "" and str(argument.real_type) == "Tensor"
                for argument, given in zip(schema(each).arguments, types, strict=True)
            )
            found.append((each, full in _on_device(), -undefined))
    best = max(found, key=lambda each: (each[1], each[2]), default=None)
    return (best[0], best[1]) if best is not None else None


def _takes(op: Any, types: tuple[str, ...]) -> bool:
    arguments = schema(op).arguments
    if len(arguments) != len(types):
        return False
    return all(_fits(str(argument.real_type), given) for argument, given in zip(arguments, types, strict=True))


def _fits(wanted: str, given: str) -> bool:
    kind = wanted.removeprefix("Optional[").removesuffix("]") if wanted.startswith("Optional[") else wanted
    if given == "":  # None, an undefined tensor, or a kind that is not recorded
        return wanted.startswith("Optional[") or kind not in RECORDED
    if given in DTYPES:
        return kind == "Tensor"
    if given == "TensorList":
        return kind.startswith("List[Tensor") or kind.startswith("List[Optional[Tensor")
    if given == "ScalarList":
        return kind.startswith("List[") and "Tensor" not in kind
    return given == "Scalar" and kind != "Tensor" and not kind.startswith("List[")


class Replay:
    """Repeats recorded calls on an emulated GPU, until `close`."""

    def __init__(self, gpu: Gpu) -> None:
        self.device = EmulatedDevice(gpu, 1)
        self.known: dict[RecordedCall, list[Kernel] | UnknownCall] = {}

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.remove()

    def kernels(self, call: RecordedCall) -> list[Kernel]:
        """The kernels that Maya expects the call to launch, in order. Raises `UnknownCall`."""
        if call not in self.known:
            try:
                self.known[call] = self._kernels(call)
            except UnknownCall as reason:
                self.known[call] = reason
        found = self.known[call]
        if isinstance(found, UnknownCall):
            raise found
        return found

    def _kernels(self, call: RecordedCall) -> list[Kernel]:
        resolved = overload(call.name, call.types)
        if resolved is None:
            raise UnknownCall(NO_OVERLOAD)
        op, _ = resolved
        native = self.device.native
        try:
            with torch.no_grad():
                arguments = _arguments(op, call)
                native.start_recording()
                try:
                    op(*arguments[0], **arguments[1])
                finally:
                    native.stop_recording()
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError) as error:
            native.take_events()
            raise UnknownCall(NOT_REPEATED) from error
        events = np.frombuffer(native.take_events(), EVENT)
        called = events[events["kind"] == EventKind.OP]["subject"]
        planner = self.device.planner
        return [kernel for number in called for kernel in kernels_of(planner.calls[number], planner.platform)]


def _arguments(op: Any, call: RecordedCall) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    shaped = [dims for given, dims in zip(call.types, call.dims, strict=True) if given in DTYPES and dims]
    for place, argument in enumerate(schema(op).arguments):
        value = _argument(argument, call, place, bool(shaped))
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def _argument(argument: Any, call: RecordedCall, place: int, beside_tensors: bool) -> Any:
    given, dims = call.types[place], call.dims[place]
    if given in DTYPES:
        strides = call.strides[place] if call.strides is not None else None
        return _tensor(DTYPES[given], dims, strides, _where(call, place, DTYPES[given], dims, beside_tensors))
    if given == "TensorList":
        if not isinstance(dims, tuple) or any(not isinstance(each, tuple) for each in dims) or not dims:
            raise UnknownCall(NO_VALUES)
        if call.elements is None:
            raise UnknownCall(NO_LIST_DTYPE)
        strides = call.strides[place] if call.strides is not None else [None] * len(dims)
        return [_tensor(call.elements, *each, "cuda") for each in zip(dims, strides, strict=True)]
    kind = str(argument.real_type).removeprefix("Optional[")
    if given == "":
        if argument.has_default_value():
            return argument.default_value
        if str(argument.real_type).startswith("Optional[") or kind == "Tensor":
            return None
        raise UnknownCall(NO_VALUES)
    text = call.values[place] if call.values is not None and place < len(call.values) else None
    if text is None or text == "":
        if kind.startswith(("number", "float")):  # the value of a factor does not matter for the kernel
            return 1.0
        raise UnknownCall(NO_VALUES)
    return _value(kind, text)


def _where(call: RecordedCall, place: int, dtype: torch.dtype, dims: tuple[int, ...], beside_tensors: bool) -> str:
    """The device of a tensor, which a trace does not contain: it follows from the direction of copies, and Python numbers are host
    tensors."""
    if call.copies and call.name == "aten::copy_":
        return "cpu" if (call.copies == "HtoD") == (place == 1) else "cuda"
    number = not dims and beside_tensors and place > 0 and dtype in NUMBERS and call.types[0] != call.types[place]
    return "cpu" if number else "cuda"


def _tensor(dtype: torch.dtype, dims: Any, strides: Any, device: str) -> torch.Tensor:
    if strides is not None and len(strides) == len(dims):
        return torch.empty_strided(dims, strides, dtype=dtype, device=device)
    return torch.empty(dims, dtype=dtype, device=device)


def _value(kind: str, text: str) -> Any:
    """Parses a number, list or enumeration as the trace writes it."""
    text = text.strip()
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("["):
        try:
            return list(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            raise UnknownCall(NO_VALUES) from None
    try:
        number = float(text)
    except ValueError:
        raise UnknownCall(NO_VALUES) from None
    if "ScalarType" in kind or kind.startswith("dtype"):
        return _named(SCALAR_TYPES, number)
    if "MemoryFormat" in kind or kind.startswith("memory_format"):
        return _named(MEMORY_FORMATS, number)
    if kind.startswith(("Device", "device")):
        return torch.device("cuda")
    if kind.startswith(("Layout", "layout")):
        return torch.strided
    if kind.startswith("int") or (kind.startswith("number") and re.fullmatch(r"-?\d+", text)):
        return int(number) if math.isfinite(number) else number
    return bool(number) if kind.startswith("bool") else number


def _named(table: tuple[Any, ...], number: float) -> Any:
    place = int(number)
    if not 0 <= place < len(table) or table[place] is None:
        raise UnknownCall(NO_VALUES)
    return table[place]
