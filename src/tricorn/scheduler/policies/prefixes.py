"""What the tree has of the requests that wait, looked up now and then."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tricorn.cache.radix import RadixTree
from tricorn.scheduler.sequence import Sequence

PATIENCE_SECONDS = 10.0
"""Whoever has waited so long comes first, in order of arrival."""

WINDOW = 64
"""Only so many requests are compared; the others keep their order behind them."""

FRESH_SECONDS = 0.1
"""For so long a lookup counts."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The pages on the way to the longest match, and its length in tokens."""

    pages: list[int]
    tokens: int
    looked_up: float


class Prefixes:
    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._known: WeakKeyDictionary[Sequence, Prefix] = WeakKeyDictionary()

    def split(self, sequences: list[Sequence], now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Those that come first whatever the tree has, and those to compare. What is beyond the window is left out: it
        could not be admitted in this step."""
        early = [s for s in sequences if s.slot >= 0 or now - s.arrived > PATIENCE_SECONDS]
        late = [s for s in sequences if s.slot < 0 and now - s.arrived <= PATIENCE_SECONDS]
        return early, late[:WINDOW]

    def of(self, sequence: Sequence, now: float) -> Prefix:
        known = self._known.get(sequence)
        if known is None or now - known.looked_up > FRESH_SECONDS:
            pages, tokens = self._tree.peek(sequence.namespace, sequence.tokens)
            known = self._known[sequence] = Prefix(pages, tokens, now)
        return known
