"""Bringing pages back from the tier below memory.

A waiting request whose next pages are on disk is not admitted at once: fresh pages are filled by the tier's thread
while others run. When they are there they go into the tree, where admission finds them like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tricorn.cache.disk import DiskTier, Fetch
from tricorn.cache.pool import PagePool
from tricorn.cache.radix import RadixTree
from tricorn.runtime.step import PAGE
from tricorn.scheduler.cost import Cost
from tricorn.scheduler.sequence import Sequence

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Load:
    """`pages` are all held: the first `known` are the tree's, the others are being filled."""

    sequence: Sequence
    pages: I32
    known: int
    fetch: Fetch


class Loading:
    """The loads under way. `write_page(page, data)` fills a page of memory."""

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        tier: DiskTier,
        write_page: Callable[[int, NDArray[np.uint8]], None],
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._tier = tier
        self._write_page = write_page
        self._loads: list[_Load] = []

    @property
    def held(self) -> list[I32]:
        """The pages that loads hold."""
        return [load.pages for load in self._loads]

    def wanted(self, sequence: Sequence, useful: int, known: int, cost: Cost | None) -> list[bytes]:
        """The keys of the pages that the tier has of the first `useful` tokens, behind `known` ones that are in memory;
        none when it is quicker to compute them."""
        keys = self._tree.keys(sequence.namespace, sequence.tokens[:useful])[known:]
        keys = keys[: self._tier.known(keys)]
        if cost is not None:
            computing = cost.prefill_seconds(known * PAGE, len(keys) * PAGE)
            if self._tier.read_seconds_per_page * len(keys) > computing:
                return []
        return keys

    def begin(self, sequence: Sequence, known: I32, fresh: I32, keys: list[bytes]) -> None:
        """Fills the pages `fresh`, behind those `known`, for a waiting sequence; all are held for it."""
        sequence.loading = True
        fetch = self._tier.fetch(keys, fresh.tolist(), self._write_page)
        self._loads.append(_Load(sequence, np.concatenate([known, fresh]), len(known), fetch))

    def land(self) -> int:
        """Takes in what has arrived; gives how many tokens."""
        tokens = 0
        for load in [load for load in self._loads if load.fetch.done]:
            self._loads.remove(load)
            sequence, full = load.sequence, load.known + load.fetch.good
            retention = sequence.request.service.retention
            known = sequence.tokens[: full * PAGE]
            self._tree.insert(sequence.namespace, known, load.pages[:full], retention)
            self._pool.release(load.pages)
            sequence.loading = False
            tokens += load.fetch.good * PAGE
        return tokens

    def wait(self, seconds: float) -> None:
        """Until the first load is done, for so long at most."""
        if self._loads:
            self._loads[0].fetch.wait(seconds)
