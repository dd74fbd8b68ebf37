"""Records of pages in a file: where they lie, and whether they are what was written.

A record is a header and the bytes of one page; records lie one after another, in slots of one size. A record is good
only if all of it is what was written: the header has a checksum, and holds the key of the page and the checksum of its
bytes. So a torn write, a flipped bit or a record of somebody else is found when it is read.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

HEADER = struct.Struct("<8sQQ32s16sQ")
"""Magic and version, bytes of the page, serial number of the write, key, XXH3-128 of the page, XXH3-64 of the header up
to here."""
MAGIC = b"TRIPAGE1"
ALIGNMENT = 4096
"""Slots begin at multiples of it."""
SCANNED = 256
"""Headers read in one go."""

log = logging.getLogger("tricorn.cache")


class Store(Protocol):
    """Where the records lie: bytes at offsets. Any call may raise OSError."""

    def size(self) -> int: ...

    def read(self, offset: int, buffer: U8) -> int:
        """Fills the buffer; gives how many bytes there were."""
        ...

    def write(self, offset: int, data: U8) -> None: ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class FileStore:
    """A file that nobody else may open as a store. Raises BlockingIOError when somebody has."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def size(self) -> int:
        return os.fstat(self._file).st_size

    def read(self, offset: int, buffer: U8) -> int:
        done = 0
        while count := os.preadv(self._file, [buffer[done:].data], offset + done):
            done += count
        return done

    def write(self, offset: int, data: U8) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:].data, offset + done)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._file, size)

    def close(self) -> None:
        os.close(self._file)


class Records:
    """Records of pages of `page_bytes` in up to `size` bytes of a store: slots 0 .. most - 1. For one thread."""

    def __init__(self, store: Store, page_bytes: int, size: int) -> None:
        self.store = store
        self.stride = -(-(HEADER.size + page_bytes) // ALIGNMENT) * ALIGNMENT
        self.most = size // self.stride
        self._page_bytes = page_bytes
        self._buffer = np.empty(HEADER.size + page_bytes, np.uint8)
        self._page = self._buffer[HEADER.size :]

    def count(self) -> int:
        """How many slots the store has by now; what is beyond the size is cut off. Raises OSError."""
        size = self.store.size()
        if size > self.most * self.stride:
            size = self.most * self.stride
            self.store.truncate(size)
        return -(-size // self.stride)

    def header(self, slot: int) -> tuple[int, bytes] | None:
        """Serial number and key of the record in a slot, (0, b"") if none was ever written there; None when it is not
        good."""
        raw = np.zeros(HEADER.size, np.uint8)
        try:
            self.store.read(slot * self.stride, raw)
        except OSError:
            return None
        if not raw.any():
            return 0, b""
        parsed = self._parse(raw)
        return parsed and parsed[:2]

    def read(self, slot: int, key: bytes) -> U8 | None:
        """The page of a record, valid until the next call; None unless the record is good and has this key."""
        try:
            count = self.store.read(slot * self.stride, self._buffer)
        except OSError:
            return None
        parsed = self._parse(self._buffer[: HEADER.size])
        if count < len(self._buffer) or parsed is None or parsed[1] != key:
            return None
        return self._page if parsed[2] == xxhash.xxh3_128_digest(self._page.data) else None

    def write(self, slot: int, serial: int, key: bytes, page: U8) -> None:
        """Raises OSError; what the slot holds is then undefined."""
        self._page[:] = page
        checksum = xxhash.xxh3_128_digest(self._page.data)
        head = HEADER.pack(MAGIC, self._page_bytes, serial, key, checksum, 0)[:-8]
        head += xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
        self._buffer[: HEADER.size] = np.frombuffer(head, np.uint8)
        self.store.write(slot * self.stride, self._buffer)

    def _parse(self, header: U8) -> tuple[int, bytes, bytes] | None:
        """Serial number, key and checksum of the page; None when it is not what was written for pages of this size."""
        magic, length, serial, key, checksum, total = HEADER.unpack(header.data)
        if magic != MAGIC or length != self._page_bytes or total != xxhash.xxh3_64_intdigest(header[:-8].data):
            return None
        return serial, key, checksum


class Scan:
    """Reads the headers of all records, some at a time. Of two records with the same key the later counts."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._at = 0
        self._found: dict[bytes, tuple[int, int]] = {}  # by key: serial number, slot
        self.count = -1
        """Slots of the file; -1 before the first step."""
        self.corrupt = 0
        self.next_serial = 0

    def step(self) -> bool:
        """Reads some more; False when that was the last."""
        if self.count < 0:
            try:
                self.count = self._records.count()
            except OSError as error:
                log.warning("what is in the disk tier's file cannot be told: %s", error)
                self.count = 0
        end = min(self._at + SCANNED, self.count)
        for slot in range(self._at, end):
            self._look(slot)
        self._at = end
        return end < self.count

    def slots(self) -> dict[bytes, int]:
        """By key, in the order they were written."""
        return {key: slot for key, (_, slot) in sorted(self._found.items(), key=lambda entry: entry[1])}

    def free(self) -> list[int]:
        """Those that hold nothing good, the last first."""
        used = {slot for _, slot in self._found.values()}
        return [slot for slot in reversed(range(self.count)) if slot not in used]

    def _look(self, slot: int) -> None:
        header = self._records.header(slot)
        if header is None:
            self.corrupt += 1
            return
        serial, key = header
        if key and self._found.get(key, (-1, 0))[0] < serial:
            self._found[key] = serial, slot
            self.next_serial = max(self.next_serial, serial + 1)
