"""The limits of this machine, measured with bare loops."""

from __future__ import annotations

import os

import msgspec

from tricorn import _native
from tricorn.compiler import instruction_set


class Machine(msgspec.Struct, frozen=True):
    """What all threads together reach: GB/s read from memory, Gop/s and Gflop/s of multiply-adds (two operations
    each)."""

    threads: int
    read_gb_s: float
    int8_gop_s: float
    bf16_gflop_s: float
    fp32_gflop_s: float


def measure(threads: int | None = None, isa: str | None = None) -> Machine:
    """Takes a second or two. `isa` None is the best instruction set (or the one that TRICORN_ISA names)."""
    threads = threads or len(os.sched_getaffinity(0))
    rates = [round(float(rate), 1) for rate in _native.measure_machine(isa or instruction_set(), threads)]
    return Machine(threads, *rates)
