"""Higher priority first. A point of priority is worth a second of waiting, so that nothing starves."""

from __future__ import annotations

from tricorn.scheduler.sequence import Sequence

SECONDS_PER_POINT = 1.0


class Priority:
    express = False

    def rank(self, sequence: Sequence) -> float:
        """All age at the same pace, so the order of two never changes: a priority is a head start."""
        return sequence.arrived - sequence.request.service.priority * SECONDS_PER_POINT

    def order(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        return sorted(sequences, key=self.rank)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        pass
