"""What the engine and its clients say to each other: tagged structs, sent as MessagePack between processes."""

from __future__ import annotations

import msgspec

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
    """A snapshot. The first six are gauges; the rest count up from the start of the engine.

    `finished` counts by reason. `step_seconds` is the time steps took, one after the other, `host_seconds` the part of
    it that Python spent on scheduling, submitting and committing (mostly while a step ran).
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    finished: dict[str, int] = {}
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step brought."""

    outputs: list[Output]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start, or is going down: one line."""

    message: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Tells the engine to stop."""


ToEngine = Request | Abort | Close
FromEngine = EngineInfo | EngineStats | Outputs | Failed
