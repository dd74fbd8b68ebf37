"""First come, first served."""

from __future__ import annotations

from tricorn.scheduler.sequence import Sequence


class Fcfs:
    express = True

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival

    def order(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        return sequences

    def charge(self, sequence: Sequence, tokens: int) -> None:
        pass
