"""The radix tree: computed prefixes, kept page by page for whoever comes with the same beginning.

A node is one page and the token ids whose KV it holds. Full nodes may have children; partial ones are leaves. The keys
of a node's children are prefix-free and sorted, so one bisection finds the child that agrees longest with a text. Keys
are the token ids themselves, as big-endian bytes, whose order is that of the ids. The idea is RadixAttention's (Zheng
et al., "SGLang", 2024).

Whoever holds the page of a node also holds those of its ancestors: `match` gives out whole paths, and `insert` tells
the caller which pages the tree has already, to be used in place of its own. So every cached page can be evicted, leaf
by leaf.

Leaves go in this order: those not pinned now before those that are; of the former the lowest retention first, then the
least recently used; of the pinned those whose time is up soonest. A node's retention, and the moment until which it is
pinned, are the most that anybody who put a text through it has asked for, so an ancestor never wants to go before its
descendants.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricorn.cache.keys import next_key, root_key
from tricorn.cache.pool import PagePool
from tricorn.request import Namespace, TricornError

I32 = NDArray[np.int32]
Order = tuple[float, int, int]


class _Node:
    """`keys` and `children` run in parallel; `used` is the tick of the last use, `hits` the matches that went through
    it; `queued` tells that the tree has it among the leaves to evict. A root has no page, but a `namespace`. `digest`
    is the page's key outside memory, once it has been asked for."""

    __slots__ = (
        "children",
        "digest",
        "hits",
        "key",
        "keys",
        "namespace",
        "page",
        "parent",
        "pinned_until",
        "queued",
        "retention",
        "used",
    )

    def __init__(self, parent: _Node | None, key: bytes, page: int, namespace: Namespace | None = None) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.namespace = namespace
        self.digest: bytes | None = None
        self.used = 0
        self.hits = 0
        self.retention = 0
        self.pinned_until = 0.0
        self.queued = False
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

    def extend(self, child: _Node, key: bytes) -> None:
        """Gives a child a longer key that begins with the one it has: its place among the others stays the same."""
        self.keys[bisect_left(self.keys, child.key)] = child.key = key

    def order(self, now: float) -> Order:
        """Leaves of lower order are evicted first."""
        return self.pinned_until if self.pinned_until > now else 0.0, self.retention, self.used


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
    """Prefixes over the pages of `pool`, one tree per namespace.

    For a tier below memory: `on_evict(key, page)` is called with each full page that is about to be freed, while its
    content is still there; `engine_id` goes into the keys (see cache/keys.py). `clock` gives seconds, as `pinned_until`
    does.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int = 16,
        *,
        clock: Callable[[], float] = time.monotonic,
        engine_id: bytes = b"",
        on_evict: Callable[[bytes, int], None] | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.evicted_pages = 0
        self._clock = clock
        self._engine_id = engine_id
        self._on_evict = on_evict
        self._roots: dict[Namespace, _Node] = {}
        self._tick = 0
        # Each leaf is in one of these, with the order it had when it came there; its order may since have risen.
        self._leaves: list[tuple[Order, int, _Node]] = []
        self._pinned: list[tuple[Order, int, _Node]] = []
        self._busy: list[_Node] = []  # were held when their turn came
        self._serial = 0
        self._unsaved: dict[_Node, None] = {}  # full pages that `unsaved` has not given yet, in order of arrival

    def match(self, namespace: Namespace, tokens: I32) -> Match:
        """The longest known prefix of `tokens` [T]; its pages are held for the caller."""
        nodes, known = self._descend(namespace, tokens)
        self._tick += 1
        for node in nodes:
            node.used = self._tick
            node.hits += 1
        pages = np.array([node.page for node in nodes], np.int32)
        self.pool.share(pages)
        tail_tokens = known % self.page_size
        if tail_tokens:
            return Match(pages[:-1], int(pages[-1]), tail_tokens, known)
        return Match(pages, -1, 0, known)

    def peek(self, namespace: Namespace, tokens: I32) -> tuple[list[int], int]:
        """The pages along the longest known prefix, a partly matching last one included, and its length in tokens.
        Holds nothing and counts as no use."""
        nodes, known = self._descend(namespace, tokens)
        return [node.page for node in nodes], known

    def insert(
        self, namespace: Namespace, tokens: I32, pages: I32, retention: int = 50, pinned_until: float = 0.0
    ) -> I32:
        """Puts a computed prefix into the tree: `tokens` [T] whose KV lies in `pages` [ceil(T / page size)], which the
        caller holds.

        Gives the page the tree now has for each *full* page of the text: the caller's own, or one with the same content
        that was there before. A caller that lives on must hold and use these instead of its own.
        """
        if not len(tokens):
            return pages[:0]
        self._tick += 1
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = _Node(None, b"", -1, namespace)
        kept = pages[: len(tokens) // self.page_size].copy()
        for index, key in enumerate(_keys(tokens, self.page_size)):
            node = self._insert_page(node, key, int(pages[index]))
            node.used = self._tick
            node.retention = max(node.retention, retention)
            node.pinned_until = max(node.pinned_until, pinned_until)
            if index < len(kept):
                kept[index] = node.page
        if not node.queued:
            self._offer(node, self._clock())
        return kept

    def evict(self, count: int) -> int:
        """Frees up to `count` cached pages, in the order told above; gives how many."""
        now = self._clock()
        self._wake(now)
        freed = 0
        while freed < count and self.pool.cached:
            order, _, node = heappop(self._leaves or self._pinned)
            node.queued = False
            if node.children:
                continue
            if self.pool.holders[node.page]:
                node.queued = True
                self._busy.append(node)
            elif node.order(now) > order:
                self._offer(node, now)
            else:
                self._drop(node, now)
                freed += 1
        self.evicted_pages += freed
        return freed

    def clear(self) -> None:
        """Forgets everything nobody holds."""
        self.evict(self.pool.total)

    def keys(self, namespace: Namespace, tokens: I32) -> list[bytes]:
        """The keys, outside memory, of the full pages of a text."""
        key = root_key(self._engine_id, namespace)
        full = len(tokens) // self.page_size * self.page_size
        return [key := next_key(key, ids) for ids in _keys(tokens[:full], self.page_size)]

    def unsaved(self, limit: int) -> list[tuple[bytes, int]]:
        """Up to `limit` full pages that were not given before, with their keys: the latest first, so that pages near a
        root come late and are the last to be overwritten below. Only with `on_evict`."""
        nodes = [self._unsaved.popitem()[0] for _ in range(min(limit, len(self._unsaved)))]
        return [(self._digest(node), node.page) for node in nodes]

    def pages(self) -> dict[int, int]:
        """Every page of the tree, and how many tokens of it count."""
        return {node.page: len(node.key) // 4 for node in self._walk() if node.parent}

    def picture(self, limit: int, visits: int) -> dict[str, Any]:
        """The tree for people: up to `limit` runs, those with the most hits and used last first, each after the one
        that it goes on from, out of at most `visits` nodes. Holds no ids.

        A run is a chain of nodes that nothing branches off and that are alike in hits and holders. Of each: its first
        `page`, the index of its `parent` (-1: it begins a text), how many `pages` and `tokens` it has, `hits`,
        `holders`, `idle` (matches and inserts since its last use), `retention`, and for how many seconds more it is
        `pinned`.
        """
        now, left = self._clock(), visits
        runs: list[dict[str, Any]] = []
        serial = count()
        heap: list[tuple[int, int, int, _Node, int]] = []
        beginnings = (child for root in self._roots.values() for child in root.children)
        for node in islice(beginnings, left):
            left -= 1
            heappush(heap, (-node.hits, -node.used, next(serial), node, -1))
        while heap and len(runs) < limit:
            *_, node, parent = heappop(heap)
            run = self._run(node, left)
            left -= len(run) - 1
            for child in islice(run[-1].children, max(0, left)):
                left -= 1
                heappush(heap, (-child.hits, -child.used, next(serial), child, len(runs)))
            runs.append(
                {
                    "page": node.page,
                    "parent": parent,
                    "pages": len(run),
                    "tokens": sum(len(each.key) for each in run) // 4,
                    "hits": node.hits,
                    "holders": int(self.pool.holders[node.page]),
                    "idle": self._tick - node.used,
                    "retention": node.retention,
                    "pinned": round(max(0.0, node.pinned_until - now), 1),
                }
            )
        return {"pages": int(np.count_nonzero(self.pool.in_tree)), "runs": runs}

    def _run(self, node: _Node, most: int) -> list[_Node]:
        """The nodes from this one on that nothing tells apart, up to `most` beside it."""
        run = [node]
        while len(node.children) == 1 and len(run) <= most:
            (child,) = node.children
            if child.hits != node.hits or self.pool.holders[child.page] != self.pool.holders[node.page]:
                break
            run.append(node := child)
        return run

    def check(self) -> None:
        """Walks the trees. Raises TricornError when they disagree with the pool or with themselves."""
        holders = self.pool.holders
        count = 0
        for node in self._walk():
            count += len(node.children)
            partial = any(len(child.key) < self.page_size * 4 and child.children for child in node.children)
            nested = any(b.startswith(a) for a, b in pairwise(node.keys))
            lost = not (node.children or node.queued)
            if partial or nested or lost or node.keys != [child.key for child in node.children]:
                raise TricornError("the prefix tree is malformed; please report this")
            if node.parent and any(holders[child.page] > 0 == holders[node.page] for child in node.children):
                raise TricornError("a page is held in the prefix tree while its parent is not; please report this")
        pages = self.pages()
        queued = len(self._leaves) + len(self._pinned) + len(self._busy)
        if len(pages) != count or queued > count or pages.keys() != set(np.flatnonzero(self.pool.in_tree).tolist()):
            raise TricornError("the prefix tree and the page pool disagree; please report this")

    def _walk(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            yield node

    def _descend(self, namespace: Namespace, tokens: I32) -> tuple[list[_Node], int]:
        """The nodes along the longest known prefix of `tokens`, and its length; the last may agree in part."""
        node = self._roots.get(namespace)
        nodes: list[_Node] = []
        if node is None:
            return nodes, 0
        for key in _keys(tokens, self.page_size):
            node, common = node.nearest(key)
            if node is None:
                break
            nodes.append(node)
            if common < self.page_size * 4:
                return nodes, (len(nodes) - 1) * self.page_size + common // 4
        return nodes, len(nodes) * self.page_size

    def _insert_page(self, parent: _Node, key: bytes, page: int) -> _Node:
        """The node of a page's ids below `parent`: one that is there, or a new one with this page."""
        child, common = parent.nearest(key)
        if child is not None and common == len(key):
            return child
        if child is not None and common == len(child.key):  # a partial page that the new one contains
            parent.extend(child, key)
            self.pool.drop(child.page)
            child.page = page
        else:
            child = _Node(parent, key, page)
            parent.attach(child)
        self.pool.keep(page)
        if self._on_evict and len(key) == self.page_size * 4:
            self._unsaved[child] = None
        return child

    def _offer(self, leaf: _Node, now: float) -> None:
        """Queues a leaf for eviction."""
        leaf.queued = True
        order = leaf.order(now)
        self._serial += 1
        heappush(self._pinned if order[0] else self._leaves, (order, self._serial, leaf))

    def _wake(self, now: float) -> None:
        """Queues anew the leaves that are pinned or held no longer."""
        expired = []
        while self._pinned and self._pinned[0][0][0] <= now:
            expired.append(heappop(self._pinned)[2])
        busy, self._busy = self._busy, []
        for leaf in expired + busy:
            if leaf.children:
                leaf.queued = False
            elif self.pool.holders[leaf.page]:
                self._busy.append(leaf)
            else:
                self._offer(leaf, now)

    def _drop(self, leaf: _Node, now: float) -> None:
        parent = leaf.parent
        assert parent is not None
        if self._on_evict and len(leaf.key) == self.page_size * 4:
            self._on_evict(self._digest(leaf), leaf.page)
        self._unsaved.pop(leaf, None)
        parent.detach(leaf)
        self.pool.drop(leaf.page)
        if parent.children:
            return
        if parent.namespace is not None:
            del self._roots[parent.namespace]
        elif not parent.queued:
            self._offer(parent, now)

    def _digest(self, node: _Node) -> bytes:
        """The key of a full page outside memory."""
        path = []
        while node.digest is None and node.parent:
            path.append(node)
            node = node.parent
        if node.digest is None:
            assert node.namespace is not None
            node.digest = root_key(self._engine_id, node.namespace)
        digest = node.digest
        for node in reversed(path):
            digest = node.digest = next_key(digest, node.key)
        return digest


def _keys(tokens: I32, page_size: int) -> Iterator[bytes]:
    """The text cut into pages, as big-endian bytes; the last may be shorter."""
    text = tokens.astype(">i4").tobytes()
    step = page_size * 4
    return (text[start : start + step] for start in range(0, len(text), step))


def _common(a: bytes, b: bytes) -> int:
    """How many leading bytes agree, rounded down to whole ids."""
    if a == b:
        return len(a)
    length = min(len(a), len(b))
    for start in range(0, length, 4):
        if a[start : start + 4] != b[start : start + 4]:
            return start
    return length
