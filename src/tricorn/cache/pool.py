"""The page pool: who owns which page of the KV cache.

A page is *held* when sequences (or a copy under way) count on it, *cached* when only the radix tree keeps it, otherwise
*free*. At any instant `free + held + cached == total`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tricorn.request import TricornError

I32 = NDArray[np.int32]


class PagePool:
    """Counted references to `total` pages, ids 0 .. total - 1. Page lists are int32 arrays without duplicates."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise TricornError(f"a page pool needs at least 1 page, not {total}: give the KV cache more memory")
        self.total = total
        self.free = total
        self.cached = 0
        self.holders = np.zeros(total, np.int32)
        self.in_tree = np.zeros(total, np.bool_)
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)  # _stack[:free] are the free pages

    @property
    def held(self) -> int:
        return self.total - self.free - self.cached

    def alloc(self, count: int) -> I32:
        """Takes `count` free pages, each held once. Raises TricornError when there are fewer."""
        if count > self.free:
            raise TricornError(f"{count} pages wanted, {self.free} of {self.total} free: evict cached pages first")
        pages = self._stack[self.free - count : self.free].copy()
        self.free -= count
        self.holders[pages] = 1
        return pages

    def share(self, pages: I32) -> None:
        """Adds one holder to each of `pages`, which are held or cached already."""
        self.cached -= int(np.count_nonzero(self.holders[pages] == 0))
        self.holders[pages] += 1

    def release(self, pages: I32) -> None:
        """Takes one holder from each of `pages`; those with none left are cached if the tree has them, else free."""
        self.holders[pages] -= 1
        left = pages[self.holders[pages] == 0]
        in_tree = self.in_tree[left]
        self.cached += int(np.count_nonzero(in_tree))
        self._push(left[~in_tree])

    def keep(self, page: int) -> None:
        """The tree takes a held page."""
        self.in_tree[page] = True

    def drop(self, page: int) -> None:
        """The tree gives a page up; it is free at once unless someone holds it."""
        self.in_tree[page] = False
        if self.holders[page] == 0:
            self.cached -= 1
            self._push(np.array([page], np.int32))

    def check(self) -> None:
        """Counts everything anew. Raises TricornError when the books do not balance."""
        free = np.zeros(self.total, np.bool_)
        free[self._stack[: self.free]] = True
        idle = self.holders == 0
        balanced = (
            np.count_nonzero(free) == self.free
            and self.cached == np.count_nonzero(idle & self.in_tree)
            and self.held == np.count_nonzero(self.holders > 0)
            and bool(np.all(free == (idle & ~self.in_tree)))
        )
        if not balanced:
            raise TricornError(
                f"page accounting is broken: {self.free} free, {self.held} held, {self.cached} cached of {self.total},"
                f" lowest holder count {self.holders.min()}; please report this"
            )

    def _push(self, pages: I32) -> None:
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
