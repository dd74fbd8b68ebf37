"""Longest prefix match: the request with the most tokens in the tree first, while they are still there (SGLang's
default policy; Zheng et al. 2024)."""

from __future__ import annotations

from tricorn.cache.radix import RadixTree
from tricorn.scheduler.policies.prefixes import Prefixes
from tricorn.scheduler.sequence import Sequence


class Lpm:
    express = False

    def __init__(self, tree: RadixTree) -> None:
        self._prefixes = Prefixes(tree)

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival

    def order(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        early, late = self._prefixes.split(sequences, now)
        return early + sorted(late, key=lambda sequence: -self._prefixes.of(sequence, now).tokens)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        pass
