"""Requests that share a branch of the tree run together: a walk of the tree in depth, at each node to the branch with
the most requests first (SGLang's dfs-weight)."""

from __future__ import annotations

from collections import Counter

from tricorn.cache.radix import RadixTree
from tricorn.scheduler.policies.prefixes import Prefixes
from tricorn.scheduler.sequence import Sequence


class DfsWeight:
    express = False

    def __init__(self, tree: RadixTree) -> None:
        self._prefixes = Prefixes(tree)
        self._weights: dict[int, int] = {}
        """The most requests that a branch has had since it was last empty: so the walk goes on where it is."""

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival

    def order(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        early, late = self._prefixes.split(sequences, now)
        paths = [self._prefixes.of(sequence, now).pages for sequence in late]
        counts = Counter(page for path in paths for page in path)
        self._weights = {page: max(count, self._weights.get(page, 0)) for page, count in counts.items()}
        weights = self._weights
        turns = [[(-weights[page], page) for page in path] + [(1, 0)] for path in paths]  # what ends here, after those
        return early + [late[place] for place in sorted(range(len(late)), key=turns.__getitem__)]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        pass
