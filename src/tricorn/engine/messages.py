"""What the engine and its clients say to each other: tagged structs, sent as MessagePack between processes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tricorn.cache.disk import TierStats
from tricorn.request import Abort, Output, Request
from tricorn.scheduler.limits import Limits


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag="info"):
    """What a ready engine can do. `pages` is the size of the KV pool, `page_bytes` what one page of `page_size` tokens
    takes."""

    model: str
    limits: Limits
    pages: int
    page_size: int
    page_bytes: int
    executor: str
    threads: int

    @property
    def context(self) -> int:
        return self.limits.context

    @property
    def vocab(self) -> int:
        return self.limits.vocab

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.limits.eos_ids

    @property
    def max_sequences(self) -> int:
        return self.limits.max_running


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """A snapshot. Up to `requests_per_second` these are gauges; the rest count up from the start of the engine.

    `prefill_token_seconds` is what one more prompt token costs, `requests_per_second` the rate at which requests end,
    both measured of late (0: not known yet); `free_slots` tells how many sequences could be admitted at once.
    `steps` counts by what a step held: "prefill", "decode" or "mixed"; `step_seconds`, by the same, is the time they
    took, one after the other. `host_seconds` is Python's part of it (mostly while a step ran), by phase: "schedule",
    "submit", "commit". `finished` counts by reason.
    """

    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    prefill_token_seconds: float = 0.0
    requests_per_second: float = 0.0
    finished: dict[str, int] = {}
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Computed once before, and lost to a preemption."""
    evicted_pages: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    """Of the hits, those read back from the disk tier."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    """Of the generated ones, those that a grammar forced: they were not sampled."""
    prefill_rows: int = 0
    decode_rows: int = 0
    steps: dict[str, int] = {}
    step_seconds: dict[str, float] = {}
    host_seconds: dict[str, float] = {}
    disk: TierStats | None = None


_GAUGES = set(EngineStats.__struct_fields__[: EngineStats.__struct_fields__.index("finished")])
_DISK_GAUGES = {"pages", "pages_most", "writing"}


def carry(past: EngineStats, stats: EngineStats) -> EngineStats:
    """The stats of an engine whose counters go on from those of the engines before it. Gauges are its own."""
    counted = {
        name: _sum(getattr(past, name), getattr(stats, name))
        for name in EngineStats.__struct_fields__
        if name not in _GAUGES and name != "disk"
    }
    return msgspec.structs.replace(stats, **counted, disk=_carry_disk(past.disk, stats.disk))


def _carry_disk(past: TierStats | None, disk: TierStats | None) -> TierStats | None:
    if past is None:
        return disk
    disk = disk or TierStats()
    names = set(TierStats.__struct_fields__) - _DISK_GAUGES
    return msgspec.structs.replace(disk, **{name: getattr(past, name) + getattr(disk, name) for name in names})


def _sum(a: Any, b: Any) -> Any:
    """Of two numbers, or of two dicts of numbers key by key."""
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}} if isinstance(a, dict) else a + b


DeathReason = Literal["signal", "memory", "hung", "silent", "failed", "exit"]
"""Killed; memory exhausted; a step that took too long; no sign of life; an error in the engine; anything else."""


class Survival(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervised engine has gone through: its deaths, starts after the first, requests that went on in another
    engine, requests given up for three deaths, and the longest time in seconds from the last word of one engine to the
    readiness of the next, while requests were live."""

    deaths: dict[DeathReason, int] = {}
    restarts: int = 0
    resumed_requests: int = 0
    dropped_requests: int = 0
    longest_pause: float = 0.0


Status = Literal["starting", "ready", "restarting", "dead"]
"""Of an engine, as its client sees it."""


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Asks for an EngineState, `tree` for one that shows the prefix tree too."""

    tree: bool = False


class EngineState(msgspec.Struct, frozen=True, tag="state"):
    """The live scheduler, pages and tree, for people: see Engine.state."""

    state: dict[str, Any]


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step brought."""

    outputs: list[Output]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start, or is going down: one line."""

    message: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Tells the engine to stop."""


ToEngine = Request | Abort | Inspect | Close
FromEngine = EngineInfo | EngineStats | EngineState | Outputs | Failed
