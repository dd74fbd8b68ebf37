"""The radix tree: computed prefixes, kept page by page for whoever comes with the same beginning.

A node is one page and the token ids whose KV it holds. Full nodes may have children; partial ones are leaves. The keys
of a node's children are prefix-free and sorted, so one bisection finds the child that agrees longest with a text. Keys
are the token ids themselves, as big-endian bytes, whose order is that of the ids. The idea is RadixAttention's (Zheng
et al., "SGLang", 2024).

Whoever holds the page of a node also holds those of its ancestors: `match` gives out whole paths, and `insert` tells
the caller which pages the tree has already, to be used in place of its own. So every cached page can be evicted, leaf
by leaf.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tricorn.cache.pool import PagePool
from tricorn.request import Namespace, TricornError

I32 = NDArray[np.int32]


class _Node:
    """`keys` and `children` run in parallel; `used` is the tick of the last use; `alive` ends when the tree drops
    it."""

    __slots__ = ("alive", "children", "key", "keys", "page", "parent", "used")

    def __init__(self, parent: _Node | None, key: bytes, page: int, used: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.used = used
        self.alive = True
        self.keys: list[bytes] = []
        self.children: list[_Node] = []

    def nearest(self, key: bytes) -> tuple[_Node | None, int]:
        """The child that agrees longest with `key`, and in how many leading bytes."""
        at = bisect_left(self.keys, key)
        best, most = None, 0
        for child in self.children[max(at - 1, 0) : at + 1]:
            common = _common(child.key, key)
            if common > most:
                best, most = child, common
        return best, most

    def attach(self, child: _Node) -> None:
        at = bisect_left(self.keys, child.key)
        self.keys.insert(at, child.key)
        self.children.insert(at, child)

    def detach(self, child: _Node) -> None:
        at = bisect_left(self.keys, child.key)
        del self.keys[at], self.children[at]


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree has of a text: whole pages, then perhaps one (`tail_page`, else -1) whose first `tail_tokens`
    tokens agree.

    Each page is held for the caller, who releases it.
    """

    pages: I32
    tail_page: int
    tail_tokens: int
    tokens: int
    """How many tokens in all, the tail's included."""


class RadixTree:
    """Prefixes over the pages of `pool`, one tree per namespace."""

    def __init__(self, pool: PagePool, page_size: int = 16) -> None:
        self.pool = pool
        self.page_size = page_size
        self._roots: dict[Namespace, _Node] = {}
        self._tick = 0
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap of (used, serial, leaf); entries may be stale
        self._serial = 0

    def match(self, namespace: Namespace, tokens: I32) -> Match:
        """The longest known prefix of `tokens` [T]; its pages are held for the caller."""
        node = self._roots.get(namespace)
        pages: list[int] = []
        tail_page, tail_tokens = -1, 0
        self._tick += 1
        for key in _keys(tokens, self.page_size):
            if node is None:
                break
            child, common = node.nearest(key)
            if child is None or common < 4:
                break
            child.used = self._tick
            if common < self.page_size * 4:
                tail_page, tail_tokens = child.page, common // 4
                break
            pages.append(child.page)
            node = child
        full = np.array(pages, np.int32)
        self.pool.share(full)
        if tail_page >= 0:
            self.pool.share(np.array([tail_page], np.int32))
        return Match(full, tail_page, tail_tokens, len(pages) * self.page_size + tail_tokens)

    def insert(self, namespace: Namespace, tokens: I32, pages: I32) -> I32:
        """Puts a computed prefix into the tree: `tokens` [T] whose KV lies in `pages` [ceil(T / page size)], which the
        caller holds.

        Gives the page the tree now has for each *full* page of the text: the caller's own, or one with the same content
        that was there before. A caller that lives on must hold and use these instead of its own.
        """
        self._tick += 1
        node = self._roots.get(namespace)
        if node is None:
            if not len(tokens):
                return pages[:0]
            node = self._roots[namespace] = _Node(None, b"", -1, self._tick)
        kept = pages[: len(tokens) // self.page_size].copy()
        for index, key in enumerate(_keys(tokens, self.page_size)):
            node = self._insert_page(node, key, int(pages[index]))
            if index < len(kept):
                kept[index] = node.page
        return kept

    def evict(self, count: int) -> int:
        """Frees up to `count` cached pages, least recently used leaves first; gives how many."""
        freed = 0
        while freed < count and self.pool.cached:
            used, _, node = heapq.heappop(self._leaves)
            if not node.alive or node.children:
                continue
            if self.pool.holders[node.page]:  # in use now; look again after everything that is not
                self._tick += 1
                node.used = self._tick
            if node.used > used:
                self._offer(node)
                continue
            self._drop(node)
            freed += 1
        return freed

    def clear(self) -> None:
        """Forgets everything nobody holds."""
        self.evict(self.pool.total)

    def pages(self) -> dict[int, int]:
        """Every page of the tree, and how many tokens of it count."""
        return {node.page: len(node.key) // 4 for node in self._walk() if node.parent}

    def check(self) -> None:
        """Walks the trees. Raises TricornError when they disagree with the pool or with themselves."""
        holders = self.pool.holders
        count = 0
        for node in self._walk():
            count += len(node.children)
            partial = any(len(child.key) < self.page_size * 4 and child.children for child in node.children)
            nested = any(b.startswith(a) for a, b in pairwise(node.keys))
            if partial or nested or node.keys != sorted(child.key for child in node.children):
                raise TricornError("the prefix tree is malformed; please report this")
            if node.parent and any(holders[child.page] > 0 == holders[node.page] for child in node.children):
                raise TricornError("a page is held in the prefix tree while its parent is not; please report this")
        pages = self.pages()
        if len(pages) != count or pages.keys() != set(np.flatnonzero(self.pool.in_tree).tolist()):
            raise TricornError("the prefix tree and the page pool disagree; please report this")

    def _walk(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            yield node

    def _insert_page(self, parent: _Node, key: bytes, page: int) -> _Node:
        child, common = parent.nearest(key)
        if child is not None and common == len(key):
            child.used = self._tick
            return child
        if child is not None and common == len(child.key):  # a partial page that the new one contains
            self._drop(child, replaced=True)
        node = _Node(parent, key, page, self._tick)
        parent.attach(node)
        self.pool.keep(page)
        self._offer(node)
        return node

    def _drop(self, node: _Node, replaced: bool = False) -> None:
        parent = node.parent
        assert parent is not None
        parent.detach(node)
        node.alive = False
        self.pool.drop(node.page)
        if parent.children or replaced:
            return
        if parent.parent is None:
            del self._roots[next(name for name, root in self._roots.items() if root is parent)]
        else:
            self._offer(parent)

    def _offer(self, leaf: _Node) -> None:
        self._serial += 1
        heapq.heappush(self._leaves, (leaf.used, self._serial, leaf))


def _keys(tokens: I32, page_size: int) -> list[bytes]:
    """The text cut into pages, as big-endian bytes; the last may be shorter."""
    text = tokens.astype(">i4").tobytes()
    step = page_size * 4
    return [text[start : start + step] for start in range(0, len(text), step)]


def _common(a: bytes, b: bytes) -> int:
    """How many leading bytes agree, rounded down to whole ids."""
    if a == b:
        return len(a)
    length = min(len(a), len(b))
    for start in range(0, length, 4):
        if a[start : start + 4] != b[start : start + 4]:
            return start
    return length
