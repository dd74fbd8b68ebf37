"""The engine file: everything that serving a model needs, in one file that is mapped, not read. `docs/engine-file.md`
describes it.

    0   8 bytes  b"TRICORN" and a zero byte
    8   u32      format version
    12  u32      zero
    16  u64      bytes of the header, which begins at byte 64
    24  u64      where the body begins (a multiple of 4096)
    32  u64      bytes of the whole file
    40  u64      xxh3-64 of the header
    48  u64      xxh3-64 of the body
    56  u64      xxh3-64 of the 56 bytes before
    64           the header, JSON; zeros up to the body; the body: tensors, each at a multiple of 64

All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tricorn.compiler.pack import Packed, unpack_matrix
from tricorn.compiler.plan import Plan
from tricorn.models.graph import Graph
from tricorn.request import TricornError

MAGIC = b"TRICORN\0"
VERSION = 1
SUFFIX = ".tricorn"
PREAMBLE = struct.Struct("<8sIIQQQQQ")
BODY_ALIGNMENT = 4096
TENSOR_ALIGNMENT = 64
MOST_HEADER = 256 << 20


class TensorEntry(msgspec.Struct, frozen=True):
    """Where a packed tensor lies: `offset` from the start of the body. A vector has one row and one block."""

    name: str
    type: str
    rows: int
    columns: int
    block_bytes: int
    blocks: int
    offset: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` tells the source's content apart; `isa` is the instruction set the file was compiled for."""

    name: str
    digest: str
    isa: str
    architecture: str
    source_bytes: int
    tokenizer: str
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    graph: Graph
    plan: Plan
    tensors: tuple[TensorEntry, ...]


class EngineFile:
    """An engine file, open and mapped."""

    def __init__(self, path: Path, header: Header, mapped: NDArray[np.uint8], body: int) -> None:
        self.path, self.header, self.mapped = path, header, mapped
        self.body: NDArray[np.uint8] = mapped[body:]
        self.name, self.graph, self.plan = header.name, header.graph, header.plan
        self.tokenizer, self.chat_template = header.tokenizer, header.chat_template
        self.bos_id, self.eos_ids, self.add_bos = header.bos_id, header.eos_ids, header.add_bos

    @classmethod
    def open(cls, path: Path, *, check_body: bool = True) -> EngineFile:
        """Maps a file and checks it. Raises TricornError when it is missing, foreign, of another version, truncated
        or corrupt."""
        path = Path(path)
        remedy = "build it again with: tricorn build"
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(64)
                if len(start) < 64 or not start.startswith(MAGIC):
                    raise TricornError(f"{path}: not an engine file of Tricorn")
                header_bytes, body, whole, header_sum, body_sum = _preamble(path, start)
                if whole != size:
                    fault = "truncated" if size < whole else "longer than it says"
                    raise TricornError(f"{path}: {fault} ({size} bytes, not {whole}); {remedy}")
                mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise TricornError(f"{path}: cannot open the engine file: {error.strerror}") from None
        raw = mapped[64 : 64 + header_bytes]
        if xxhash.xxh3_64_intdigest(raw.data) != header_sum or (
            check_body and xxhash.xxh3_64_intdigest(mapped[body:].data) != body_sum
        ):
            raise TricornError(f"{path}: corrupt (its checksum does not fit its content); {remedy}")
        try:
            header = msgspec.json.decode(raw.tobytes(), type=Header)
        except msgspec.MsgspecError as error:
            raise TricornError(f"{path}: unreadable header ({error}); {remedy}") from None
        return cls(path, header, mapped, body)

    def entry(self, name: str) -> TensorEntry:
        return next(entry for entry in self.header.tensors if entry.name == name)

    def packed(self, entry: TensorEntry) -> Packed:
        data = self.body[entry.offset : entry.offset + entry.blocks * entry.block_bytes]
        return Packed(entry.type, entry.rows, entry.columns, data.reshape(entry.blocks, entry.block_bytes))

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Every weight of the graph as float32, unpacked: what the reference executor computes with."""
        values: dict[str, NDArray[np.float32]] = {}
        for entry in self.header.tensors:
            packed = self.packed(entry)
            if entry.blocks == 1 and entry.rows == 1:
                values[entry.name] = packed.data.reshape(-1).view(np.float32)[: entry.columns]
            else:
                values[entry.name] = unpack_matrix(packed)
        for op in self.plan.ops:  # a merged product's bias goes back to its parts
            for segment in op.segments:
                if op.bias is not None:
                    joined = values[op.bias]
                    own = segment.weight.removesuffix("weight") + "bias"
                    values[own] = joined[segment.column : segment.column + self.entry(segment.weight).rows]
        return values


def _preamble(path: Path, start: bytes) -> tuple[int, int, int, int, int]:
    """Bytes of the header, start of the body, bytes of the file, checksums of header and body."""
    remedy = "build it again with: tricorn build"
    if xxhash.xxh3_64_intdigest(start[:56]) != int.from_bytes(start[56:64], "little"):
        raise TricornError(f"{path}: corrupt (its first bytes are damaged); {remedy}")
    _, version, _, header_bytes, body, whole, header_sum, body_sum = PREAMBLE.unpack(start[:56])
    if version != VERSION:
        raise TricornError(f"{path}: engine file of version {version}, this is version {VERSION}; {remedy}")
    if header_bytes > MOST_HEADER or body % BODY_ALIGNMENT or not 64 + header_bytes <= body <= whole:
        raise TricornError(f"{path}: corrupt (impossible sizes); {remedy}")
    return header_bytes, body, whole, header_sum, body_sum


def is_whole(path: Path) -> bool:
    """Whether there is an engine file of this version and of the size it says; opening it checks the content."""
    try:
        with open(path, "rb") as file:
            start = file.read(64)
            size = os.fstat(file.fileno()).st_size
        return len(start) == 64 and start.startswith(MAGIC) and _preamble(path, start)[2] == size
    except (OSError, TricornError):
        return False


def layout(tensors: Iterable[tuple[str, Packed]]) -> Iterator[TensorEntry]:
    """Places tensors one after another, aligned."""
    at = 0
    for name, packed in tensors:
        blocks, block_bytes = packed.data.shape
        yield TensorEntry(name, packed.type, packed.rows, packed.columns, block_bytes, blocks, at)
        at += -(-blocks * block_bytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def write(path: Path, header: Header, tensors: Iterable[Packed]) -> int:
    """Writes the file under a temporary name, then renames it; returns its size in bytes. `tensors` come in the
    header's order.

    Raises TricornError when there is no room or no permission; nothing is left behind then.
    """
    raw = msgspec.json.encode(header)
    body = -(-(64 + len(raw)) // BODY_ALIGNMENT) * BODY_ALIGNMENT
    digest = xxhash.xxh3_64()
    with replacing(path) as file:
        file.write(bytes(64) + raw + bytes(body - 64 - len(raw)))
        at = 0
        for entry, packed in zip(header.tensors, tensors, strict=True):
            for piece in (bytes(entry.offset - at), np.ascontiguousarray(packed.data).data):
                file.write(piece)
                digest.update(piece)
            at = entry.offset + entry.blocks * entry.block_bytes
        whole = body + at
        start = PREAMBLE.pack(
            MAGIC, VERSION, 0, len(raw), body, whole, xxhash.xxh3_64_intdigest(raw), digest.intdigest()
        )
        file.seek(0)
        file.write(start + xxhash.xxh3_64_intdigest(start).to_bytes(8, "little"))
    return whole


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise TricornError(
            f"{path}: cannot write the engine file: {error.strerror}; free some room or choose another place"
        ) from None
    finally:
        with suppress(OSError):  # not there: renamed, or never made
            temporary.unlink()
