"""Tensors of the Open Inference Protocol: named arrays of one type, as JSON, as raw bytes, and as both look in Python.

Raw bytes are little endian and in row-major order; an element of BYTES has its length in four bytes before it.
Everything raises HttpError 400 that names the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tricorn.server.errors import HttpError, printable

MAX_DIMENSIONS = 8

TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
"""The types that NumPy knows; BF16 and BYTES are the others."""

INTEGERS = frozenset(name for name in TYPES if "INT" in name)
FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})


@dataclass(frozen=True)
class Tensor:
    """`values` are flat: bool, int, float, or bytes (str is taken too) for BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def fault(name: str, what: str) -> HttpError:
    return HttpError(400, f"{printable(name, 80)}: {what}", printable(name, 80), "invalid_value")


def check_shape(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements there are to be."""
    if datatype not in TYPES and datatype not in ("BYTES", "BF16"):
        raise fault(name, f"unknown datatype {printable(datatype, 40)}")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise fault(name, f"a shape has at most {MAX_DIMENSIONS} dimensions, none below 0")
    return prod(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], data: Any) -> Tensor:
    """From JSON, nested by the shape or flat, or from the typed contents of a message."""
    count = check_shape(name, datatype, shape)
    values = _flat(data)
    if len(values) != count:
        raise fault(name, f"{len(values)} elements do not make the shape {list(shape)}")
    if not all(isinstance(value, _kinds(datatype)) for value in values):
        raise fault(name, f"an element is not of the datatype {datatype}")
    if datatype in INTEGERS and values:
        bounds = np.iinfo(TYPES[datatype])
        if min(values) < bounds.min or max(values) > bounds.max or any(isinstance(value, bool) for value in values):
            raise fault(name, f"an element is not of the datatype {datatype}")
    return Tensor(name, datatype, tuple(shape), values)


def _flat(data: Any) -> list[Any]:
    """Lists in lists, level by level."""
    values: list[Any] = list(data)
    while any(isinstance(value, list) for value in values):
        values = [inner for value in values for inner in (value if isinstance(value, list) else [value])]
    return values


def _kinds(datatype: str) -> type | tuple[type, ...]:
    if datatype == "BYTES":
        return (bytes, str)
    if datatype == "BOOL":
        return bool
    return int if datatype in INTEGERS else (int, float)


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    count = check_shape(name, datatype, shape)
    if datatype == "BYTES":
        values: list[Any] = _elements(name, raw)
    else:
        kind = np.dtype(np.uint16 if datatype == "BF16" else TYPES[datatype]).newbyteorder("<")
        if len(raw) != count * kind.itemsize:
            raise fault(name, f"{len(raw)} bytes do not make the shape {list(shape)} of {datatype}")
        array = np.frombuffer(raw, kind)
        if datatype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        values = array.tolist()
    if len(values) != count:
        raise fault(name, f"{len(values)} elements do not make the shape {list(shape)}")
    return Tensor(name, datatype, tuple(shape), values)


def _elements(name: str, raw: bytes) -> list[bytes]:
    elements = []
    place = 0
    while place < len(raw):
        length = int.from_bytes(raw[place : place + 4], "little")
        place += 4 + length
        if place > len(raw):
            raise fault(name, "the lengths of its elements do not fit its bytes")
        elements.append(raw[place - length : place])
    return elements


def to_raw(tensor: Tensor) -> bytes:
    if tensor.datatype != "BYTES":
        return np.asarray(tensor.values, np.dtype(TYPES[tensor.datatype]).newbyteorder("<")).tobytes()
    elements = [value.encode() if isinstance(value, str) else value for value in tensor.values]
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)
