"""What is known of each request while it lives, and told when it ends: one line in the log, one span in a trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from tricorn.request import SamplingParams, Timings
from tricorn.server.tracing import Tracing

Phase = Literal["reading", "tokenizing", "waiting", "generating"]

CLIENT_GONE = 499
"""The status in the log when the client left before the answer began."""

log = logging.getLogger("tricorn.server.requests")


@dataclass(slots=True)
class Entry:
    """One HTTP exchange. Times are those of `time.monotonic()`, except `arrived`, in seconds since 1970. The fields
    from `params` on stay as they are for what is no generation. `number` is its place in the order of arrival, which
    no other has, while the `id` is what the client says.
    """

    id: str
    route: str
    traceparent: str | None = None
    """The header of that name: the span of the caller."""
    started: float = field(default_factory=time.monotonic)
    arrived: float = field(default_factory=time.time)
    phase: Phase = "reading"
    number: int = 0
    status: int = CLIENT_GONE
    error: str | None = None
    """The code of the error that ended it, in a stream too."""
    params: SamplingParams | None = None
    answer_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    timings: Timings | None = None
    """Of the sequence that ended last."""


class Journal:
    """The requests that live, by their order of arrival."""

    def __init__(self, model: str, tracing: Tracing | None = None) -> None:
        self._model = model
        self._tracing = tracing
        self._numbers = count(1)
        self._live: dict[int, Entry] = {}

    @contextmanager
    def follow(self, entry: Entry) -> Iterator[None]:
        """Keeps a request in the books until it ends, and then says so."""
        entry.number = next(self._numbers)
        self._live[entry.number] = entry
        try:
            yield
        finally:
            del self._live[entry.number]
            self._tell(entry)

    def live(self) -> list[dict[str, Any]]:
        """For people; ages in seconds."""
        now = time.monotonic()
        return [
            {
                "id": entry.id,
                "number": entry.number,
                "route": entry.route,
                "age": round(now - entry.started, 3),
                "phase": entry.phase,
                "prompt_tokens": entry.prompt_tokens,
                "output_tokens": entry.output_tokens,
            }
            for entry in self._live.values()
        ]

    def _tell(self, entry: Entry) -> None:
        seconds = time.monotonic() - entry.started
        level = _level(entry)
        if log.isEnabledFor(level):
            log.log(level, "request", extra={"fields": _fields(entry, seconds)})
        if self._tracing is not None and entry.params is not None:
            self._tracing.record(entry, self._model, seconds)


def _level(entry: Entry) -> int:
    """A probe is of no interest, whatever it hears; a failure of ours is of some to everybody."""
    if entry.status == 500 or (entry.error is not None and entry.status == 200):
        return logging.WARNING
    return logging.DEBUG if entry.params is None and entry.error is None else logging.INFO


def _fields(entry: Entry, seconds: float) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": entry.id, "route": entry.route, "status": entry.status}
    if entry.params is not None:
        fields["prompt_tokens"] = entry.prompt_tokens
        fields["cached_tokens"] = entry.cached_tokens
        fields["output_tokens"] = entry.output_tokens
        fields["finish_reasons"] = entry.finish_reasons
        if entry.first_token is not None:
            fields["first_token_s"] = round(entry.first_token - entry.started, 6)
        if entry.timings is not None:
            fields["queue_s"] = round(entry.timings.queued, 6)
            fields["prefill_s"] = round(entry.timings.prefill, 6)
            fields["decode_s"] = round(entry.timings.decode, 6)
    if entry.error is not None:
        fields["error"] = entry.error
    return {**fields, "total_s": round(seconds, 6)}
