"""A clock that moves only when told to."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the simulation began. Called, it tells the time, as `time.monotonic` does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def until(self, time: float) -> None:
        """Moves to `time`, never back."""
        self.now = max(self.now, time)
