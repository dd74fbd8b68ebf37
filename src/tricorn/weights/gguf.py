"""Reads the header of a GGUF file (versions 2 and 3, little-endian) and maps its tensors.

Format: `docs/gguf.md` of ggml. Every number in the file is checked against what is left of the file before it is used,
so a damaged or hostile file costs one clear error, and no memory to speak of. Nothing of the tensors is read here.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tricorn.request import TricornError
from tricorn.weights.tensor import BLOCK, Tensor, bytes_of

MAX_ENTRIES = 1 << 16
"""The most metadata keys, and the most tensors, that a file may name."""
MAX_NAME = 1 << 10
MAX_ALIGNMENT = 1 << 20

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_UINT32, _STRING, _ARRAY = 4, 8, 9
# fmt: off
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K",
          14: "Q6_K", 30: "BF16"}
_OTHER_TYPES = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
                20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
                28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
# fmt: on
_MISSING: Any = object()


class Metadata:
    """The key-value part, with each value asked for by the type it must have.

    Scalars are Python's own, arrays of strings are lists, other arrays NumPy's. A missing key gives `default`, or an
    error when there is none.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, cause: str) -> NoReturn:
        raise TricornError(f"{self.path}: {cause}")

    def _get(self, key: str, default: Any, wanted: str, kinds: tuple[type, ...]) -> Any:
        if key not in self.values:
            if default is _MISSING:
                self.fail(f"the GGUF metadata lack {key!r}")
            return default
        value = self.values[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.fail(f"GGUF key {key!r} must be {wanted}")
        return value

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """An integer; a per-layer array of equal integers counts as one."""
        value = self._get(key, default, "an integer", (int, np.ndarray))
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "iu" or not len(value) or (value != value[0]).any():
                self.fail(f"GGUF key {key!r} differs between layers, which is not supported")
            return int(value[0])
        return value

    def positive(self, key: str, default: Any = _MISSING) -> Any:
        """An integer from 1 to 2**31 - 1."""
        value = self.integer(key, default)
        if value is not None and not 0 < value < 1 << 31:
            self.fail(f"GGUF key {key!r} is {value}, outside 1 to 2**31 - 1")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        value = self._get(key, default, "a number", (int, float))
        if value is not None and not np.isfinite(value):
            self.fail(f"GGUF key {key!r} is not finite")
        return value

    def text(self, key: str, default: Any = _MISSING) -> Any:
        return self._get(key, default, "a string", (str,))

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        return self._get(key, default, "a boolean", (bool,))

    def texts(self, key: str) -> list[str]:
        value: list[str] = self._get(key, _MISSING, "an array of strings", (list,))
        return value

    def array(self, key: str, kind: str, length: int) -> NDArray[Any]:
        """A numeric array of `length` whose dtype kinds are among `kind` ("iu", "f")."""
        value: NDArray[Any] = self._get(key, _MISSING, "an array of numbers", (np.ndarray,))
        if value.dtype.kind not in kind or value.dtype.itemsize != 4 or len(value) != length:
            self.fail(f"GGUF key {key!r} must hold {length} 32-bit numbers of kind {kind!r}")
        return value


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """`tensors`: views of the mapped file, under the file's names. `header`: the bytes before them."""

    metadata: Metadata
    tensors: dict[str, Tensor]
    header: memoryview


class _Cursor:
    """Takes typed values from the mapped file in order, never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def fail(self, cause: str) -> NoReturn:
        raise TricornError(f"{self.path}: damaged or incomplete GGUF file, fetch it again: {cause}")

    def take(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.at:
            self.fail(f"{what} at byte {self.at} reaches past the end of the file")
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, smallest: int, what: str) -> int:
        """A number of items of which each takes at least `smallest` bytes."""
        n = self.u64(what)
        if n > (len(self.data) - self.at) // smallest:
            self.fail(f"{what} is {n}, more than the file can hold")
        return n

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def name(self, what: str) -> str:
        name = self.text(what)
        if not 0 < len(name) <= MAX_NAME:
            self.fail(f"{what} has {len(name)} characters, allowed are 1 to {MAX_NAME}")
        return name

    def texts(self, n: int, what: str) -> list[str]:
        """n strings (a 64-bit length, then UTF-8). The hot loop of opening a file: vocabularies have 10^5 entries."""
        data, at, end = self.data, self.at, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        out = []
        for _ in range(n):
            start = at + 8
            at = start + length_at(data, at)[0] if start <= end else end + 1
            if at > end:
                self.fail(f"a string of {what} at byte {start} reaches past the end of the file")
            try:
                out.append(data[start:at].decode())
            except UnicodeDecodeError:
                self.fail(f"a string of {what} at byte {start} is not UTF-8")
        self.at = at
        return out

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.fail(f"key {key!r} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize, key), dtype)[0].item()

    def array(self, key: str) -> list[str] | NDArray[Any]:
        kind = self.u32(key)
        if kind == _STRING:
            return self.texts(self.count(8, f"length of {key!r}"), key)
        if kind not in _SCALARS:
            self.fail(f"key {key!r} is an array of the unknown or unsupported type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        n = self.count(dtype.itemsize, f"length of {key!r}")
        return np.frombuffer(self.take(n * dtype.itemsize, key), dtype)


def read(path: Path) -> GGUFFile:
    """Opens a GGUF file. Raises TricornError for anything that is not a whole, sound file of a known version."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise TricornError(f"{path}: the file is empty") from None
    except OSError as error:
        raise TricornError(f"{path}: cannot be read: {error.strerror}") from None
    cursor = _Cursor(path, data)
    tensor_count, key_count = _preamble(cursor)
    values, alignment = _metadata(cursor, key_count)
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    header = memoryview(data)[: cursor.at]
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(Metadata(path, values), _tensors(cursor, infos, start, alignment), header)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    if cursor.take(4, "the magic number") != b"GGUF":
        raise TricornError(f"{cursor.path}: not a GGUF file (it does not begin with 'GGUF')")
    version = cursor.u32("version")
    if version not in (2, 3):
        hint = "it is big-endian" if version in (2 << 24, 3 << 24) else "convert the model again"
        raise TricornError(f"{cursor.path}: GGUF version {version} is not supported, only 2 and 3 are ({hint})")
    tensors = cursor.count(24, "number of tensors")
    keys = cursor.count(13, "number of keys")
    if max(tensors, keys) > MAX_ENTRIES:
        cursor.fail(f"{tensors} tensors and {keys} keys, more than {MAX_ENTRIES}")
    return tensors, keys


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], int]:
    """The keys with their values, and the alignment of the tensors."""
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name("a key")
        kind = cursor.u32(f"type of {key!r}")
        if key in values:
            cursor.fail(f"key {key!r} comes twice")
        if key == "general.alignment" and kind != _UINT32:
            cursor.fail("key 'general.alignment' must be an unsigned 32-bit number")
        values[key] = cursor.value(kind, key)
    alignment = values.get("general.alignment", 32)
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"alignment {alignment} is not a power of two from 1 to {MAX_ALIGNMENT}")
    return values, alignment


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


def _tensor_info(cursor: _Cursor) -> _Info:
    name = cursor.name("a tensor's name")
    dims = cursor.u32(f"dimensions of {name!r}")
    if not 1 <= dims <= 4:
        cursor.fail(f"tensor {name!r} has {dims} dimensions, allowed are 1 to 4")
    shape = tuple(cursor.u64(f"shape of {name!r}") for _ in range(dims))[::-1]  # ggml lists columns first
    kind = cursor.u32(f"type of {name!r}")
    offset = cursor.u64(f"offset of {name!r}")
    if kind not in _TYPES:
        named = _OTHER_TYPES.get(kind, str(kind))
        raise TricornError(f"{cursor.path}: tensor {name!r} has type {named}; supported are {', '.join(BLOCK)}")
    if not all(0 < n < 1 << 40 for n in shape):
        cursor.fail(f"tensor {name!r} has the impossible shape {shape}")
    if shape[-1] % BLOCK[_TYPES[kind]][0]:
        cursor.fail(f"tensor {name!r}: {shape[-1]} columns are not whole blocks of {_TYPES[kind]}")
    return _Info(name, _TYPES[kind], shape, offset, bytes_of(_TYPES[kind], shape))


def _tensors(cursor: _Cursor, infos: list[_Info], start: int, alignment: int) -> dict[str, Tensor]:
    """Views of the data of each tensor; none may reach past the file or into another."""
    tensors: dict[str, Tensor] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.offset):
        if info.name in tensors:
            cursor.fail(f"tensor {info.name!r} comes twice")
        if info.offset % alignment or info.offset < end:
            cursor.fail(f"tensor {info.name!r} at offset {info.offset} is misaligned or overlaps another")
        end = info.offset + info.size
        if start + end > len(cursor.data):
            cursor.fail(f"tensor {info.name!r} ends at byte {start + end} of {len(cursor.data)}")
        raw = np.frombuffer(cursor.data, np.uint8, info.size, start + info.offset)
        data = raw if len(info.shape) == 1 else raw.reshape(-1, bytes_of(info.type, info.shape[-1:]))
        tensors[info.name] = Tensor(info.type, info.shape, data)
    return tensors
