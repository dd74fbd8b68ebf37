"""A disk in memory that fails as disks do: reads and writes that raise, bits that flip, writes that are torn."""

from __future__ import annotations

from random import Random

import numpy as np

from tricorn.runtime.step import U8
from tricorn.simulate.clock import VirtualClock


class FaultyStore:
    """Keeps what is written, beyond the death of an engine. Reads fail with probability `rate`, as often bits flip, as
    often writes are torn; a twentieth as often the disk is full. `clock` is that of the tier's thread: a read takes
    `read_seconds` of it."""

    def __init__(self, random: Random, rate: float, read_seconds: float) -> None:
        self.clock = VirtualClock()
        self.faults = 0
        self._bytes = np.zeros(0, np.uint8)
        self._random = random
        self._rate = rate
        self._read_seconds = read_seconds

    def size(self) -> int:
        return len(self._bytes)

    def read(self, offset: int, buffer: U8) -> int:
        self.clock.until(self.clock.now + self._read_seconds)
        if self._fails():
            raise OSError("the simulated disk cannot read")
        there = self._bytes[offset : offset + len(buffer)]
        buffer[: len(there)] = there
        if len(there) and self._fails():
            buffer[self._random.randrange(len(there))] ^= 1 << self._random.randrange(8)
        return len(there)

    def write(self, offset: int, data: U8) -> None:
        if self._fails(0.05):
            raise OSError("the simulated disk is full")
        end = offset + len(data)
        if end > len(self._bytes):
            self._bytes = np.concatenate([self._bytes, np.zeros(end - len(self._bytes), np.uint8)])
        if self._fails():  # torn: the rest is what was there before
            end = offset + self._random.randrange(len(data))
        self._bytes[offset:end] = data[: end - offset]

    def truncate(self, size: int) -> None:
        self._bytes = self._bytes[:size].copy()

    def close(self) -> None:
        pass

    def _fails(self, share: float = 1.0) -> bool:
        failed = self._rate > 0 and self._random.random() < share * self._rate
        self.faults += failed
        return failed
