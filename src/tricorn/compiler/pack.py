"""Packing: a tensor as the kernels want it, without losing a bit of it.

Sixteen rows of a matrix make a block; `docs/engine-file.md` draws it. Integer types keep their scales and offsets as
they are: the planes
of a block are its scales, offsets, inner scales and inner offsets (as far as the type has them, padded together to 64
bytes), then
the quants, group after group of 32 columns. In a group, the low four bits of column 4j+b and column 16+4j+b share the
byte
[j][row][b]; a fifth bit lies in a plane of bytes [row][b] whose bit s belongs to column 4s+b, a fifth and sixth in
two planes likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tricorn.request import TricornError
from tricorn.weights.tensor import BLOCK, Tensor

U8 = NDArray[np.uint8]

ROWS = 16
GROUP = 32
LINE = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix, `data` [blocks, block bytes] (or a float32 vector as bytes [1, n])."""

    type: str
    rows: int
    columns: int
    data: U8


def kind_of(type_name: str) -> str:
    """The kind of activations that a matrix of this type multiplies: "q8", "bf16" or "f32"."""
    return {"F32": "f32", "F16": "f32", "BF16": "bf16"}.get(type_name, "q8")


def pack_vector(tensor: Tensor) -> Packed:
    """A norm weight or a bias, as float32, padded with zeros to whole groups."""
    values = tensor.dequantize().reshape(-1)
    padded = np.zeros(-(-len(values) // GROUP) * GROUP, np.float32)
    padded[: len(values)] = values
    return Packed("F32", 1, len(values), padded.view(np.uint8).reshape(1, -1))


def pack_matrix(name: str, tensor: Tensor) -> Packed:
    """Raises TricornError when the columns do not fill whole groups of 32."""
    rows, columns = tensor.shape
    if columns % GROUP:
        raise TricornError(
            f"the tensor {name!r} has {columns} columns; the native executor needs a multiple of {GROUP}"
        )
    raw = np.ascontiguousarray(tensor.data).reshape(rows, -1)
    missing = -rows % ROWS
    if missing:
        raw = np.concatenate((raw, np.zeros((missing, raw.shape[1]), np.uint8)))
    blocks = raw.reshape(len(raw) // ROWS, ROWS, -1)
    packed = _FLOATS[tensor.type](blocks) if tensor.type in _FLOATS else _pack_integers(tensor.type, blocks)
    return Packed(tensor.type, rows, columns, packed)


def unpack_matrix(packed: Packed) -> NDArray[np.float32]:
    """The float32 values [rows, columns] of a packed matrix, bit for bit those of the source: the proof of the
    packing."""
    unpack = _UNPACK_FLOATS.get(packed.type)
    values = unpack(packed.data) if unpack else _unpack_integers(packed)
    return values.reshape(-1, packed.columns)[: packed.rows]


# Floats: [column][row], BF16 with the columns in pairs.


def _by_column(word: type[np.generic], pair: int, blocks: U8) -> U8:
    words = blocks.view(word)
    n = len(words)
    return np.ascontiguousarray(words.reshape(n, ROWS, -1, pair).transpose(0, 2, 1, 3)).reshape(n, -1).view(np.uint8)


_FLOATS = {
    "F32": lambda blocks: _by_column(np.uint32, 1, blocks),
    "F16": lambda blocks: _by_column(np.uint16, 1, blocks),
    "BF16": lambda blocks: _by_column(np.uint16, 2, blocks),
}


def _by_row(word: type[np.generic], pair: int, data: U8) -> NDArray[np.generic]:
    words = data.view(word)
    n = len(words)
    return np.ascontiguousarray(words.reshape(n, -1, ROWS, pair).transpose(0, 2, 1, 3)).reshape(n * ROWS, -1)


_UNPACK_FLOATS = {
    "F32": lambda data: _by_row(np.uint32, 1, data).view(np.float32),
    "F16": lambda data: _by_row(np.uint16, 1, data).view(np.float16).astype(np.float32),
    "BF16": lambda data: (_by_row(np.uint16, 2, data).astype(np.uint32) << 16).view(np.float32),
}


# Integers: the source's fields are cut out of its blocks, then laid into planes.


@dataclass(frozen=True, slots=True)
class Fields:
    """Where a source block of one type keeps its parts, as byte ranges; None: it has none."""

    bits: int
    scale: tuple[int, int]
    low: tuple[int, int]
    offset: tuple[int, int] | None = None
    high: tuple[int, int] | None = None
    inner: tuple[int, int] | None = None


_FIELDS = {
    "Q4_0": Fields(4, (0, 2), (2, 18)),
    "Q4_1": Fields(4, (0, 2), (4, 20), offset=(2, 4)),
    "Q5_0": Fields(5, (0, 2), (6, 22), high=(2, 6)),
    "Q5_1": Fields(5, (0, 2), (8, 24), offset=(2, 4), high=(4, 8)),
    "Q8_0": Fields(8, (0, 2), (2, 34)),
    "Q4_K": Fields(4, (0, 2), (16, 144), offset=(2, 4), inner=(4, 16)),
    "Q5_K": Fields(5, (0, 2), (48, 176), offset=(2, 4), high=(16, 48), inner=(4, 16)),
    "Q6_K": Fields(6, (208, 210), (0, 128), high=(128, 192), inner=(192, 208)),
}


def _pack_integers(type_name: str, blocks: U8) -> U8:
    fields, n = _FIELDS[type_name], len(blocks)
    source = blocks.reshape(n, ROWS, -1, BLOCK[type_name][1])
    planes = [_lanes(source[..., slice(*span)]) for span in (fields.scale, fields.offset) if span]
    if fields.inner:
        planes += _inner_scales(type_name, source[..., slice(*fields.inner)])
    head = np.concatenate([plane.reshape(n, -1) for plane in planes], axis=1)
    padding = np.zeros((n, -head.shape[1] % LINE), np.uint8)
    return np.concatenate((head, padding, _quants(type_name, fields, source)), axis=1)


def _lanes(field: U8) -> U8:
    """[blocks, row, group, bytes] -> [blocks, group, row, bytes]."""
    return np.ascontiguousarray(field.transpose(0, 2, 1, 3))


def _inner_scales(type_name: str, field: U8) -> list[U8]:
    """The small scales (and offsets) of a K-quant as bytes, [blocks, group (or half group), row]."""
    n, rows = field.shape[:2]
    if type_name == "Q6_K":
        parts = [field]
    else:  # eight 6-bit scales and offsets in twelve bytes
        low, middle, last = field[..., 0:4], field[..., 4:8], field[..., 8:12]
        scales = np.concatenate((low & 63, (last & 15) | (low >> 6 << 4)), axis=-1)
        offsets = np.concatenate((middle & 63, (last >> 4) | (middle >> 6 << 4)), axis=-1)
        parts = [scales, offsets]
    return [np.ascontiguousarray(p.reshape(n, rows, -1).transpose(0, 2, 1)) for p in parts]


def _quants(type_name: str, fields: Fields, source: U8) -> U8:
    n, rows = source.shape[:2]
    low = source[..., slice(*fields.low)]
    if type_name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):  # nibbles are paired as we want them
        nibbles = low.reshape(n, rows, -1, 4, 4)
        high = source[..., slice(*fields.high)].view(np.uint32) if fields.high else None
        top: U8 | None = None if high is None else ((high >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8)
    else:
        q = _columns(type_name, fields, source)  # [n, rows, groups, 32]
        if fields.bits == 8:
            return np.ascontiguousarray(q.reshape(n, rows, -1, 8, 4).transpose(0, 2, 3, 1, 4)).reshape(n, -1)
        halves = q.reshape(n, rows, -1, 2, 4, 4)
        nibbles = np.asarray((halves[..., 0, :, :] & 15) | (halves[..., 1, :, :] << 4), np.uint8)
        top = np.asarray(q >> 4, np.uint8) if fields.bits > 4 else None
    planes = [nibbles.transpose(0, 2, 3, 1, 4).reshape(n, nibbles.shape[2], -1)]
    if top is not None:
        planes.append(_high_planes(top.reshape(n, rows, -1, GROUP), fields.bits - 4))
    return np.ascontiguousarray(np.concatenate(planes, axis=2)).reshape(n, -1)


def _high_planes(top: U8, bits: int) -> U8:
    """The bits above the fourth, [n, rows, groups, 32] -> [n, groups, plane bytes]."""
    per_byte = 8 // bits
    fields = top.reshape(*top.shape[:3], bits, per_byte, 4)
    shifts = (bits * np.arange(per_byte, dtype=np.uint8)).reshape(per_byte, 1)
    planes = np.bitwise_or.reduce(fields << shifts, axis=4)  # [n, rows, groups, plane, b]
    n, _, groups = planes.shape[:3]
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1, 4)).reshape(n, groups, -1)


def _columns(type_name: str, fields: Fields, source: U8) -> U8:
    """Unsigned integers of every column, [n, rows, groups, 32]."""
    n, rows, supers = source.shape[:3]
    low = source[..., slice(*fields.low)]
    if type_name == "Q8_0":
        return low ^ np.uint8(128)
    if type_name == "Q6_K":
        quarter = low.reshape(n, rows, supers, 2, 1, 64)
        nibbles = np.concatenate((quarter & 15, quarter >> 4), axis=4).reshape(n, rows, supers, 2, 4, 32)
        high = source[..., slice(*(fields.high or (0, 0)))].reshape(n, rows, supers, 2, 1, 32)
        shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
        return np.asarray(nibbles | ((high >> shifts & 3) << 4), np.uint8).reshape(n, rows, -1, GROUP)
    chunks = low.reshape(n, rows, supers, 4, 1, 32)
    q = np.concatenate((chunks & 15, chunks >> 4), axis=4).reshape(n, rows, supers, 8, 32)
    if fields.high:
        high = source[..., slice(*fields.high)].reshape(n, rows, supers, 1, 32)
        q = q | ((high >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1) << 4)
    return q.reshape(n, rows, -1, GROUP)


_ZERO_POINT = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32}


def _unpack_integers(packed: Packed) -> NDArray[np.float32]:
    """By the kernels' own reading of the planes, each product in float32 as ggml's formulas have it."""
    fields, n = _FIELDS[packed.type], len(packed.data)
    groups = packed.columns // GROUP
    supers = packed.columns // BLOCK[packed.type][0]
    at = 0

    def plane(count: int, dtype: type[np.generic]) -> NDArray[np.float32]:
        nonlocal at
        size = count * ROWS * np.dtype(dtype).itemsize
        values = np.ascontiguousarray(packed.data[:, at : at + size]).view(dtype).reshape(n, count, ROWS)
        at += size
        return values.astype(np.float32).repeat(groups * GROUP // count, axis=1)  # [n, columns, row]

    scale = plane(supers, np.float16)
    offset = plane(supers, np.float16) if fields.offset else None
    if packed.type == "Q6_K":
        scale = scale * plane(2 * groups, np.int8)
    elif fields.inner:
        scale = scale * plane(groups, np.uint8)
        assert offset is not None
        offset = -(offset * plane(groups, np.uint8))
    at += -at % LINE
    q = _unpack_quants(fields.bits, packed.data[:, at:].reshape(n, groups, -1)).astype(np.float32)
    zero = _ZERO_POINT.get(packed.type, 0)
    values = scale * (q - zero)
    if offset is not None:
        values += offset
    return np.ascontiguousarray(values.transpose(0, 2, 1))


def _unpack_quants(bits: int, data: U8) -> U8:
    """[n, groups, group bytes] -> unsigned integers [n, columns, row]."""
    n, groups = data.shape[:2]
    if bits == 8:
        return data.reshape(n, groups, 8, ROWS, 4).transpose(0, 1, 2, 4, 3).reshape(n, -1, ROWS)
    nibbles = data[..., :256].reshape(n, groups, 1, 4, ROWS, 4)
    q = np.concatenate((nibbles & 15, nibbles >> 4), axis=2).reshape(n, groups, 8, ROWS, 4)
    if bits > 4:
        width, per_byte = bits - 4, 8 // (bits - 4)
        planes = data[..., 256:].reshape(n, groups, width, 1, ROWS, 4)
        shifts = (width * np.arange(per_byte, dtype=np.uint8)).reshape(per_byte, 1, 1)
        high = (planes >> shifts & np.uint8((1 << width) - 1)).reshape(n, groups, 8, ROWS, 4)
        q = q | (high << 4)
    return np.ascontiguousarray(q.transpose(0, 1, 2, 4, 3)).reshape(n, -1, ROWS)
