"""How an engine is set up. What is left None is derived from the machine and the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tricorn.request import TricornError
from tricorn.runtime.step import PAGE
from tricorn.scheduler.options import SchedulerOptions

KvType = Literal["f16", "bf16", "f32"]

KV_SHARE = 0.25
KV_MOST = 4 << 30
KV_LEAST = 16 << 20
MOST_PAGES = 1 << 20
MAX_SEQUENCES = 64
MAX_BATCHED_TOKENS = 512
SCORED_ROWS = 64
"""A step samples a row for each running sequence, and scores up to so many: logits are the largest buffers there
are."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`path` is an engine file; for the executor "reference", a model file or folder. `kv_bytes` is the size of the KV
    pool."""

    path: str
    executor: Literal["native", "reference"] = "native"
    threads: int | None = None
    kv_type: KvType = "f16"
    kv_bytes: int | None = None
    max_sequences: int | None = None
    max_batched_tokens: int | None = None
    scheduler: SchedulerOptions = SchedulerOptions()
    kv_disk: str | None = None
    """A folder for pages that memory has no room for (see cache/disk.py)."""
    kv_disk_bytes: int = 4 << 30
    """What the pages of this engine may take there."""
    step_timeout: float = 60.0
    """An engine process whose step takes longer than so many seconds ends itself, to be started anew."""
    debug_checks: bool = False
    """Check the books of the cache after every step."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the options come to: `context` in tokens, `max_tokens` and `max_rows` per step."""

    threads: int
    pages: int
    context: int
    max_sequences: int
    max_tokens: int
    max_rows: int


def derive(options: EngineOptions, page_bytes: int, model_context: int) -> Sizes:
    """Fills in what is None. Raises TricornError for numbers that cannot work."""
    for name in ("threads", "kv_bytes", "max_sequences", "max_batched_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise TricornError(f"{name} is {value}; it must be at least 1")
    kv_bytes = options.kv_bytes or int(min(max(available_memory() * KV_SHARE, KV_LEAST), KV_MOST))
    tokens = options.max_batched_tokens or MAX_BATCHED_TOKENS
    wanted = options.max_sequences or MAX_SEQUENCES
    pages = min(kv_bytes // page_bytes, MOST_PAGES)
    if pages < 2:
        raise TricornError(f"a KV cache of {kv_bytes} bytes holds {pages} pages of {page_bytes}; it needs at least 2")
    sequences = min(wanted, tokens, pages)
    return Sizes(
        threads=options.threads or len(os.sched_getaffinity(0)),
        pages=pages,
        context=min(model_context, pages * PAGE),
        max_sequences=sequences,
        max_tokens=tokens,
        max_rows=max(sequences, min(tokens, SCORED_ROWS)),
    )


def available_memory() -> int:
    """Bytes that a new process could use now: of the machine, and of the control group if it has a limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text())
        return min(available, most - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
