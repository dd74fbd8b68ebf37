"""How much each caller may ask for: token buckets, one for requests and one for tokens, each with a minute's worth.

A generation takes its prompt and all the tokens that it may sample when it begins, and gives back at its end what it
did not use. What is more than a whole bucket takes the whole bucket at first and the rest at the end, which may leave
a debt: nothing is refused for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tricorn.server.errors import HttpError

MINUTE = 60.0

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class RateOptions:
    """Requests and tokens in a minute, for each caller. None: any."""

    requests: int | None = None
    tokens: int | None = None


class Bucket:
    """Fills at an even rate up to `capacity` in a minute; `level` may be below 0."""

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self.level = float(capacity)
        self._filled = now

    def fill(self, now: float) -> None:
        self.level = min(float(self.capacity), self.level + self.capacity * max(0.0, now - self._filled) / MINUTE)
        self._filled = now

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there, 0 when it is; at most a whole bucket is asked for."""
        return max(0.0, min(amount, self.capacity) - self.level) * MINUTE / self.capacity

    @property
    def reset(self) -> float:
        """Seconds until it is full."""
        return self.wait(self.capacity)


class Reservation:
    """Tokens that a generation has taken; `settle` once, with what it used."""

    def __init__(self, bucket: Bucket | None, taken: float, fill: Callable[[], None]) -> None:
        self._bucket = bucket
        self._taken = taken
        self._fill = fill

    def settle(self, used: int) -> None:
        if self._bucket is not None:
            self._fill()
            self._bucket.level = min(float(self._bucket.capacity), self._bucket.level + self._taken - used)
            self._bucket = None


class Rates:
    """The buckets of every caller. Both methods raise HttpError 429 and then take nothing."""

    def __init__(self, options: RateOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def request(self, caller: str) -> None:
        """Counts a request."""
        bucket = self._bucket(self._requests, self._options.requests, caller)
        if bucket is not None:
            self._take(bucket, 1, "requests")

    def reserve(self, caller: str, tokens: int) -> Reservation:
        """Takes what a generation may use."""
        bucket = self._bucket(self._tokens, self._options.tokens, caller)
        if bucket is None:
            return Reservation(None, 0, lambda: None)
        taken = min(tokens, bucket.capacity)
        self._take(bucket, taken, "tokens")
        return Reservation(bucket, taken, lambda: bucket.fill(self._clock()))

    def headers(self, caller: str) -> Headers:
        """How the caller stands, as the OpenAI API tells it."""
        found: list[tuple[bytes, bytes]] = []
        for name, buckets, capacity in (
            (b"requests", self._requests, self._options.requests),
            (b"tokens", self._tokens, self._options.tokens),
        ):
            bucket = self._bucket(buckets, capacity, caller)
            if bucket is not None:
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.capacity),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(0, int(bucket.level))),
                    (b"x-ratelimit-reset-" + name, duration(bucket.reset).encode()),
                ]
        return tuple(found)

    def _bucket(self, buckets: dict[str, Bucket], capacity: int | None, caller: str) -> Bucket | None:
        """Filled up to now; None without a limit."""
        if capacity is None:
            return None
        now = self._clock()
        bucket = buckets.get(caller)
        if bucket is None:
            bucket = buckets[caller] = Bucket(capacity, now)
        bucket.fill(now)
        return bucket

    def _take(self, bucket: Bucket, amount: int, what: str) -> None:
        wait = bucket.wait(amount)
        if wait > 1e-9:
            raise HttpError(
                429,
                f"the limit of {bucket.capacity} {what} per minute is reached: ask again in {duration(wait)}",
                code="rate_limit_exceeded",
                retry_after=wait,
                reason="rate",
            )
        bucket.level -= amount


def duration(seconds: float) -> str:
    """ "6m0s", "1.5s", "20ms", as the OpenAI API writes them."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
