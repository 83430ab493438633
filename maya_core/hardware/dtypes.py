"""The table of element types: their names in torch's C++ and Python, the bytes of an element, and the peak rate of a GPU at which their
products run. All other modules use this table.
"""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """One element type."""

    name: str  # torch's name in Python
    bytes: int
    rate: str  # key of a GPU's `peak_flops`


# By the name of c10::ScalarType, which traces use.
DTYPES = {
    "Byte": Dtype("uint8", 1, "int8"),
    "Char": Dtype("int8", 1, "int8"),
    "Short": Dtype("int16", 2, "float32"),
    "Int": Dtype("int32", 4, "float32"),
    "Long": Dtype("int64", 8, "float32"),
    "Bool": Dtype("bool", 1, "float32"),
    "UInt16": Dtype("uint16", 2, "float32"),
    "UInt32": Dtype("uint32", 4, "float32"),
    "UInt64": Dtype("uint64", 8, "float32"),
    "Half": Dtype("float16", 2, "float16"),
    "BFloat16": Dtype("bfloat16", 2, "bfloat16"),
    "Float": Dtype("float32", 4, "float32"),
    "Double": Dtype("float64", 8, "float64"),
    "ComplexHalf": Dtype("complex32", 4, "float16"),
    "ComplexFloat": Dtype("complex64", 8, "float32"),
    "ComplexDouble": Dtype("complex128", 16, "float64"),
    "Float8_e4m3fn": Dtype("float8_e4m3fn", 1, "float8"),
    "Float8_e5m2": Dtype("float8_e5m2", 1, "float8"),
    "Float8_e4m3fnuz": Dtype("float8_e4m3fnuz", 1, "float8"),
    "Float8_e5m2fnuz": Dtype("float8_e5m2fnuz", 1, "float8"),
    "Float8_e8m0fnu": Dtype("float8_e8m0fnu", 1, "float8"),
    "Float4_e2m1fn_x2": Dtype("float4_e2m1fn_x2", 1, "float4"),
}
_OTHER = Dtype("", 1, "float32")  # quantized types, and types that torch adds later

# Bytes of an operand, by the rate at which its products run; TF32 products read float32.
RATE_BYTES = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4, "float64": 8, "float8": 1, "float4": 1, "int8": 1}
RATES = tuple(RATE_BYTES)

HALVES = ("Half", "BFloat16")
FLOATS = ("Float", "Double", *HALVES)


def dtype(name: str) -> Dtype:
    """The element type with this name in C++."""
    return DTYPES.get(name, _OTHER)


def item_bytes(name: str) -> int:
    return dtype(name).bytes
