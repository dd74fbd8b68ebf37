"""Who is let in, and who is told at once to come back later.

Three bounds: sequences let in (those that run and those that wait), prompt tokens that wait, and the seconds that a
newcomer would wait. The first costs nothing and comes before any work on a prompt; the others need its tokens. A gate
that nobody waits at takes any prompt, so that what it refuses now it would take later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from tricorn.engine.messages import EngineStats
from tricorn.request import TricornError

RefusalReason = Literal["sequences", "tokens", "time"]
REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)

LATEST = 0.1
"""Weight of the latest sequence in the mean time that one holds its slot."""

LONGEST_RETRY = 3600.0
"""Seconds; no estimate is worth more."""


class Refused(TricornError):
    """No room now. `retry_after` is when to expect some, in seconds: at least 1."""

    def __init__(self, message: str, reason: RefusalReason, retry_after: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = min(max(1.0, retry_after), LONGEST_RETRY)


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The most sequences that wait, the most prompt tokens that wait, and the longest wait in seconds (0: any)."""

    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    max_wait: float = 60.0


class Gate:
    """Keeps count of one engine's requests. `slots` is how many sequences it runs at once."""

    def __init__(
        self, slots: int, options: GateOptions = GateOptions(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.options = options
        self.sequences = 0
        """Let in and not ended."""
        self.waiting_tokens = 0
        """Prompt tokens of sequences that have not begun."""
        self._slots = slots
        self._clock = clock
        self._held = 0.0  # seconds from a sequence's first token to its end, the mean of late; 0: not known

    @property
    def capacity(self) -> int:
        """The most sequences that can be in at the same time."""
        return self._slots + self.options.max_waiting

    def enter(self, sequences: int, stats: EngineStats) -> Ticket:
        """Lets so many sequences in, whose prompts are not known yet. Raises Refused."""
        if self.sequences + sequences > self.capacity:
            raise Refused(
                f"the server holds {self.sequences} of at most {self.capacity} sequences, {sequences} more do not fit",
                "sequences",
                self._seconds(self.sequences + sequences - self.capacity, stats),
            )
        self.sequences += sequences
        return Ticket(self, sequences, self._clock)

    def wait(self, stats: EngineStats, newest: int = 0) -> float:
        """For how many seconds the last sequence that was let in will wait. `newest` tells how many of those that were
        let in are not with the engine yet for certain.

        It waits for slots, at the rate at which requests end, and for the prompts before its own. The engine's stats
        are a moment old: sequences let in that they do not show are on their way to it.
        """
        unseen = max(newest, self.sequences - stats.running - stats.waiting)
        without_slot = stats.waiting + unseen - stats.free_slots
        return max(self._seconds(without_slot, stats), self.waiting_tokens * stats.prefill_token_seconds)

    def _seconds(self, sequences: int, stats: EngineStats) -> float:
        """How long until so many sequences have ended; 0 when nothing is known. Where few requests came few have
        ended, so what the engine measured is no less than what it can do: its slots, each held for as long as of late.
        """
        rate = max(stats.requests_per_second, self._slots / self._held if self._held else 0.0)
        return sequences / rate if sequences > 0 and rate > 0 else 0.0

    def _learn(self, held: float) -> None:
        self._held = held if not self._held else self._held + LATEST * (held - self._held)


class Ticket:
    """The place of one client's request. A context manager: leaving gives the place back, however the request ends."""

    def __init__(self, gate: Gate, sequences: int, clock: Callable[[], float]) -> None:
        self.sequences = sequences
        self.waiting = sequences
        """Of the sequences, those that have brought no token yet."""
        self._gate = gate
        self._clock = clock
        self._tokens = 0
        self._began: float | None = None

    def queue(self, tokens: int, stats: EngineStats) -> None:
        """Names the request's prompt tokens. Raises Refused when so many more may not wait, or would wait too long."""
        gate, options = self._gate, self._gate.options
        before = gate.waiting_tokens
        if before and before + tokens > options.max_waiting_tokens:
            raise Refused(
                f"{before} of at most {options.max_waiting_tokens} prompt tokens wait, {tokens} more do not fit",
                "tokens",
                (before + tokens - options.max_waiting_tokens) * stats.prefill_token_seconds,
            )
        wait = gate.wait(stats, self.sequences)
        if 0 < options.max_wait < wait:
            raise Refused(
                f"a request would wait for some {wait:.0f} s now, longer than the {options.max_wait:g} s that it may",
                "time",
                wait - options.max_wait,
            )
        self._tokens = tokens
        gate.waiting_tokens += tokens

    def begin(self) -> None:
        """One more of the sequences has brought its first token."""
        if self._began is None:
            self._began = self._clock()
        self._wait(self.waiting - 1)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        if self._began is not None:
            self._gate._learn(self._clock() - self._began)
        self._wait(0)
        self._gate.sequences -= self.sequences
        self.sequences = 0

    def _wait(self, sequences: int) -> None:
        """Leaves so many of the sequences waiting, and their share of the tokens."""
        before, self.waiting = self._share(), sequences
        self._gate.waiting_tokens += self._share() - before

    def _share(self) -> int:
        return self._tokens * self.waiting // self.sequences if self.waiting else 0
