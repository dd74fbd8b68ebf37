"""A tensor as it lies in the file: its type, its shape and its raw bytes, and how those bytes mean numbers.

The types and block layouts are ggml's (`ggml-common.h`, `ggml-quants.c`); safetensors files bring F32, F16, BF16 only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

BLOCK: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Type -> (values in a block, bytes in a block). A row is a whole number of blocks."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Weights as stored. `shape` is row-major, (rows, columns) or (n,).

    `data` holds the stored bytes, possibly a read-only view of the mapped file: [rows, bytes per row] for a matrix,
    [bytes] for a vector.
    """

    type: str
    shape: tuple[int, ...]
    data: U8

    def dequantize(self) -> F32:
        """The values as float32, of `shape`, by ggml's own formulas (same order of operations, so bit for bit)."""
        blocks = np.ascontiguousarray(self.data).reshape(-1, BLOCK[self.type][1])
        with np.errstate(all="ignore"):
            return _DEQUANTIZE[self.type](blocks).reshape(self.shape)

    def take_rows(self, order: NDArray[np.intp]) -> Tensor:
        """The same rows (elements of a vector) in another order; blocks never cross a row, so any type survives it."""
        rows = self.data.reshape(self.shape[0], -1)
        return Tensor(self.type, self.shape, rows[order].reshape(self.data.shape))


def from_float32(values: F32) -> Tensor:
    """An F32 tensor of a vector or a matrix."""
    data = np.ascontiguousarray(values, np.float32).view(np.uint8)
    return Tensor("F32", values.shape, data)


def bytes_of(type_name: str, shape: tuple[int, ...]) -> int:
    """Bytes a tensor takes in its file, its columns being whole blocks. Python integers: nothing wraps."""
    values, size = BLOCK[type_name]
    count = 1
    for n in shape:
        count *= n
    return count // values * size


def _half(raw: U8) -> F32:
    """Float16 bytes [n, 2k] -> float32 [n, k]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: U8, group: int) -> U8:
    """4-bit values: each run of `group` bytes holds `group` values in the low halves, then as many in the high ones."""
    raw = raw.reshape(len(raw), -1, group)
    return np.concatenate((raw & 15, raw >> 4), axis=2).reshape(len(raw), -1)


def _fifth_bits(raw: U8) -> U8:
    """The 32 fifth bits of a Q5_0 or Q5_1 block, moved to their place (0 or 16)."""
    return np.unpackbits(raw, axis=1, bitorder="little") * np.uint8(16)


def _f32(b: U8) -> F32:
    return b.view(np.float32).copy()


def _f16(b: U8) -> F32:
    return _half(b)


def _bf16(b: U8) -> F32:
    return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: U8) -> F32:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(b: U8) -> F32:
    return _half(b[:, :2]) * _nibbles(b[:, 4:], 16).astype(np.float32) + _half(b[:, 2:4])


def _q5_0(b: U8) -> F32:
    q = _nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6])
    return _half(b[:, :2]) * (q.astype(np.float32) - 16)


def _q5_1(b: U8) -> F32:
    q = _nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8])
    return _half(b[:, :2]) * q.astype(np.float32) + _half(b[:, 2:4])


def _q8_0(b: U8) -> F32:
    return _half(b[:, :2]) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _k_scales(b: U8) -> tuple[F32, F32]:
    """The 8 scales and 8 minima of a Q4_K or Q5_K block (6-bit numbers times two halves), float32 [n, 8, 1] each."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=1)
    minimum = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), axis=1)
    halves = _half(b[:, :4])
    return (halves[:, :1] * scale)[:, :, None], (halves[:, 1:] * minimum)[:, :, None]


def _k_quant(b: U8, q: U8) -> F32:
    scale, minimum = _k_scales(b)
    return (scale * q.reshape(-1, 8, 32) - minimum).reshape(-1, 256)


def _q4_k(b: U8) -> F32:
    return _k_quant(b, _nibbles(b[:, 16:], 32))


def _q5_k(b: U8) -> F32:
    shifts = np.arange(8, dtype=np.uint8)[:, None]  # bit j of each of the 32 bytes belongs to sub-block j
    fifth = ((b[:, None, 16:48] >> shifts & 1) << 4).astype(np.uint8)
    return _k_quant(b, _nibbles(b[:, 48:], 32) | fifth.reshape(-1, 256))


def _q6_k(b: U8) -> F32:
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) * np.uint8(16)
    q = (_nibbles(b[:, :128], 64) | top.reshape(-1, 256)).astype(np.float32) - 32
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return ((_half(b[:, 208:]) * scale)[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


_DEQUANTIZE: dict[str, Callable[[U8], F32]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
