"""The page pool and the radix tree on their own, against plain models of themselves."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tricorn.cache.pool import PagePool
from tricorn.cache.radix import RadixTree
from tricorn.request import Namespace, TricornError

PAGE = 16
FIXED = settings(derandomize=True, deadline=None, max_examples=80)


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def put(
    tree: RadixTree,
    text: np.ndarray,
    namespace: Namespace = Namespace(),
    retention: int = 50,
    pinned_until: float = 0.0,
) -> np.ndarray:
    """Inserts a text as if it had just been computed on fresh pages, and lets go of them."""
    count = -(-len(text) // PAGE)
    if tree.pool.free < count:
        tree.evict(count - tree.pool.free)
    pages = tree.pool.alloc(count)
    kept = tree.insert(namespace, text, pages, retention, pinned_until)
    tree.pool.release(pages)
    return kept


def get(tree: RadixTree, text: np.ndarray, namespace: Namespace = Namespace()) -> int:
    """How many tokens of a text are known."""
    match = tree.match(namespace, text)
    tree.pool.release(match.pages)
    if match.tail_page >= 0:
        tree.pool.release(tokens(match.tail_page))
    return match.tokens


def test_pages_pass_from_free_to_held_to_cached() -> None:
    pool = PagePool(4)
    pages = pool.alloc(3)
    assert (pool.free, pool.held, pool.cached) == (1, 3, 0)
    pool.share(pages[:1])
    pool.keep(int(pages[1]))
    pool.release(pages)
    assert (pool.free, pool.held, pool.cached) == (2, 1, 1)
    pool.share(pages[1:2])
    assert (pool.held, pool.cached) == (2, 0)
    pool.drop(int(pages[1]))
    assert (pool.held, pool.free) == (2, 2)
    pool.release(pages[:2])
    assert pool.free == pool.total
    pool.check()


def test_the_pool_refuses_what_it_cannot_give() -> None:
    pool = PagePool(2)
    with pytest.raises(TricornError, match="3 pages wanted, 2 of 2 free"):
        pool.alloc(3)
    with pytest.raises(TricornError, match="at least 1 page"):
        PagePool(0)


def test_a_page_freed_twice_is_noticed() -> None:
    """A-073: an accounting error is loud."""
    pool = PagePool(3)
    pages = pool.alloc(2)
    pool.release(pages)
    pool.holders[pages[0]] = 1
    with pytest.raises(TricornError, match="page accounting is broken"):
        pool.check()


def test_a_match_is_exact_to_the_token() -> None:
    tree = RadixTree(PagePool(16))
    text = np.arange(40, dtype=np.int32)
    put(tree, text)
    for length in range(41):
        assert get(tree, text[:length]) == length
        if length < 40:
            changed = text.copy()
            changed[length] = 99
            assert get(tree, changed) == length
    assert get(tree, np.arange(60, dtype=np.int32)) == 40


def test_only_equal_ids_match() -> None:
    """A-069: keys are the ids, not a hash of them; ids that differ in one bit, in any byte, do not match."""
    tree = RadixTree(PagePool(16))
    text = np.full(32, 0x01010101, np.int32)
    put(tree, text)
    for bit in range(31):
        changed = text.copy()
        changed[20] ^= 1 << bit
        assert get(tree, changed) == 20


def test_many_prompts_never_mix() -> None:
    """A-069: fifty prompts over two ids, so that everything nearly collides: a match is what comparing the ids says."""
    random = Random(1)
    tree = RadixTree(PagePool(500))
    texts = [tokens(*(random.randrange(2) for _ in range(random.randrange(1, 40)))) for _ in range(50)]
    for text in texts:
        put(tree, text)
    for text in [*texts, *(tokens(*(random.randrange(2) for _ in range(30))) for _ in range(50))]:
        known = max(common(text, other) for other in texts)
        assert get(tree, text) == known


def test_a_longer_text_takes_the_place_of_a_shorter_one() -> None:
    tree = RadixTree(PagePool(8))
    text = np.arange(30, dtype=np.int32)
    for length in (3, 9, 16, 20, 30):
        put(tree, text[:length])
        tree.check()
    assert tree.pool.cached == 2
    put(tree, text[:5])
    assert tree.pool.cached == 2


def test_the_tree_keeps_the_first_of_equal_pages() -> None:
    tree = RadixTree(PagePool(8))
    text = np.arange(32, dtype=np.int32)
    first = put(tree, text)
    assert np.array_equal(put(tree, text), first)
    assert tree.pool.cached == 2


def test_least_recently_used_leaves_go_first() -> None:
    tree = RadixTree(PagePool(8))
    texts = [tokens(*([i] * 20)) for i in range(4)]  # two pages each
    for text in texts:
        put(tree, text)
    assert get(tree, texts[0]) == 20
    held = tree.match(Namespace(), texts[1])
    assert tree.evict(4) == 4
    assert [get(tree, text) for text in texts] == [20, 20, 0, 0]
    assert tree.evict(8) == 2  # what is held stays
    assert get(tree, texts[1]) == 20
    tree.pool.release(held.pages)
    tree.pool.release(tokens(held.tail_page))
    tree.clear()
    assert tree.pool.free == 8
    assert tree.pages() == {}


def test_a_page_evicted_while_it_is_copied_from_is_not_free() -> None:
    tree = RadixTree(PagePool(2))
    put(tree, tokens(1, 2, 3))
    match = tree.match(Namespace(), tokens(1, 2, 9))
    assert (match.tail_tokens, match.tokens, len(match.pages)) == (2, 2, 0)
    assert tree.evict(2) == 0
    put(tree, tokens(1, 2, 3, 4))  # takes the place of the page under copy
    assert (tree.pool.held, tree.pool.cached) == (1, 1)
    tree.pool.release(tokens(match.tail_page))
    assert tree.pool.free == 1
    tree.check()


def test_a_peek_holds_nothing_and_is_no_use() -> None:
    tree = RadixTree(PagePool(8))
    old, new = tokens(*range(40)), tokens(*range(100, 140))
    pages = put(tree, old)
    put(tree, new)
    for length in range(41):
        seen, known = tree.peek(Namespace(), old[:length])
        assert known == length
        assert seen[:2] == pages[: -(-length // PAGE)].tolist()[:2]
        assert len(seen) == -(-length // PAGE)
    assert tree.peek(Namespace(), tokens(*range(20), 7)) == (pages.tolist(), 20)
    assert tree.peek(Namespace(), tokens(7)) == ([], 0)
    assert tree.peek(Namespace("other"), old) == ([], 0)
    assert tree.pool.held == 0
    tree.evict(3)
    assert (get(tree, old), get(tree, new)) == (0, 40)


def test_namespaces_come_and_go() -> None:
    """A-068: the same text under another salt, tenant or adapter is another text, and an empty tree leaves nothing."""
    tree = RadixTree(PagePool(64))
    text = tokens(*range(20))
    spaces = [Namespace(*fields) for fields in ("xyz", ("x", "", ""), ("", "x", ""), ("", "", "x"), ("", "", ""))]
    for count, space in enumerate(spaces):
        assert [get(tree, text, other) for other in spaces] == [20] * count + [0] * (5 - count)
        put(tree, text, space)
    tree.evict(4)
    assert [get(tree, text, space) for space in spaces] == [0, 0, 20, 20, 20]
    tree.clear()
    assert tree._roots == {}
    for number in range(1000):
        put(tree, text, Namespace(str(number)))
        assert len(tree._roots) <= 32
        tree.evict(2)
    assert tree._roots == {}
    assert tree.evicted_pages == 10 + 2000


def test_lower_retention_goes_first() -> None:
    tree = RadixTree(PagePool(12))
    texts = {retention: tokens(*([retention] * 20)) for retention in (100, 0, 51, 50)}
    for retention, text in texts.items():
        put(tree, text, retention=retention)
    get(tree, texts[0])  # being used does not save it
    for gone, retention in enumerate((0, 50, 51, 100)):
        assert {r for r, text in texts.items() if get(tree, text) < 20} == set(sorted(texts)[:gone])
        assert tree.evict(1) == 1
        assert get(tree, texts[retention]) == 16  # the leaf, then its parent
        assert tree.evict(1) == 1
    assert tree.pool.free == 12


def test_the_highest_retention_asked_for_counts() -> None:
    tree = RadixTree(PagePool(12))
    stem, other = tokens(*range(16)), tokens(*range(50, 66))
    put(tree, stem, retention=10)
    put(tree, np.concatenate([stem, tokens(1, 2)]), retention=90)
    put(tree, np.concatenate([stem, tokens(1, 2, 3)]), retention=20)  # takes the place of the page of 90
    put(tree, np.concatenate([stem, tokens(9)]), retention=20)
    put(tree, stem, retention=0)
    put(tree, other, retention=80)
    assert tree.evict(2) == 2
    assert get(tree, other) == 0
    assert get(tree, np.concatenate([stem, tokens(1, 2, 3)])) == 19
    assert get(tree, np.concatenate([stem, tokens(9)])) == 16
    put(tree, other, retention=85)
    assert tree.evict(1) == 1
    assert get(tree, other) == 0
    tree.evict(1)
    put(tree, other, retention=85)
    assert tree.evict(1) == 1
    assert (get(tree, stem), get(tree, other)) == (16, 0)


def test_a_pin_holds_until_its_time_or_until_nothing_else_is_left() -> None:
    now = 100.0
    tree = RadixTree(PagePool(12), clock=lambda: now)
    pinned, short, plain = (tokens(*([i] * 20)) for i in range(3))
    put(tree, pinned, retention=0, pinned_until=200.0)
    put(tree, short, retention=0, pinned_until=101.0)
    put(tree, plain, retention=100)
    assert tree.evict(2) == 2
    assert get(tree, plain) == 0
    put(tree, plain, retention=100)
    now = 101.0
    assert tree.evict(2) == 2
    assert [get(tree, text) for text in (pinned, short, plain)] == [20, 0, 20]
    put(tree, short, retention=0, pinned_until=150.0)
    assert tree.evict(4) == 4
    assert [get(tree, text) for text in (pinned, short, plain)] == [20, 0, 0]
    assert tree.evict(4) == 2
    assert tree.pool.free == 12


def test_pages_in_use_never_stand_in_the_way() -> None:
    """Held leaves of the lowest retention: eviction ends, and finds them once they are let go."""
    tree = RadixTree(PagePool(20))
    texts = [tokens(*([i] * 20)) for i in range(10)]
    for i, text in enumerate(texts):
        put(tree, text, retention=i * 10)
    held = [tree.match(Namespace(), text) for text in texts[:5]]
    for _ in range(3):
        assert tree.evict(1) == 1
        tree.check()
    assert tree.evict(20) == 7
    assert tree.evict(1) == 0
    for match in held:
        tree.pool.release(match.pages)
        tree.pool.release(tokens(match.tail_page))
    assert tree.evict(3) == 3
    assert [get(tree, text) for text in texts[:3]] == [0, 16, 20]
    assert tree.evict(20) == 7


def test_the_queue_of_leaves_does_not_grow() -> None:
    """Branches of a prefix that stays come and go, pinned or not, held or not, ten thousand times."""
    now = 0.0
    tree = RadixTree(PagePool(16), clock=lambda: now)
    stem = tokens(*range(32))
    put(tree, stem, retention=100, pinned_until=1e9)
    for turn in range(10_000):
        now += 1
        put(tree, np.concatenate([stem, tokens(turn, *range(turn % 20))]), retention=turn % 3, pinned_until=turn % 5000)
        if turn % 7 == 0:
            get(tree, stem)
        assert len(tree._leaves) + len(tree._pinned) + len(tree._busy) <= 16
    tree.check()
    assert get(tree, stem) == 32


def test_what_is_evicted_is_told_while_it_is_there() -> None:
    told: list[tuple[bytes, int]] = []
    tree = RadixTree(PagePool(8), engine_id=b"engine", on_evict=lambda key, page: told.append((key, page)))
    text = tokens(*range(40))
    pages = put(tree, text, Namespace("salt"))
    keys = tree.keys(Namespace("salt"), text)
    assert tree.evict(1) == 1  # the partial page is of no use to anybody else
    assert told == []
    assert tree.evict(2) == 2
    assert told == [(keys[1], pages[1]), (keys[0], pages[0])]
    assert tree.unsaved(10) == []


def test_pages_not_saved_yet_are_given_once() -> None:
    tree = RadixTree(PagePool(16), engine_id=b"engine", on_evict=lambda key, page: None)
    text = tokens(*range(70))
    put(tree, text[:20])
    pages = put(tree, text)
    keys = tree.keys(Namespace(), text)
    given = tree.unsaved(3) + tree.unsaved(0) + tree.unsaved(3)
    assert given == list(zip(keys, pages.tolist(), strict=True))[::-1]
    assert tree.unsaved(3) == []
    put(tree, text)
    assert tree.unsaved(3) == []
    other = put(tree, tokens(*range(100, 132)))
    tree.evict(6)  # all of the first, and one of these
    assert [page for _, page in tree.unsaved(3)] == other[:1].tolist()


@given(seed=st.integers(0, 2**32), pages=st.integers(1, 16), width=st.integers(1, 3))
@FIXED
def test_the_lowest_leaf_that_nobody_holds_goes(seed: int, pages: int, width: int) -> None:
    random = Random(seed)
    now = 0.0
    tree = RadixTree(PagePool(pages), clock=lambda: now)
    held: list[np.ndarray] = []
    for _ in range(60):
        now += random.choice([0.0, 0.5, 3.0])
        text = tokens(*(random.randrange(width) for _ in range(random.randrange(0, 16 * pages))))
        match random.randrange(4):
            case 0:
                if -(-len(text) // PAGE) <= tree.pool.free + tree.pool.cached:
                    put(tree, text, retention=random.randrange(4), pinned_until=now + random.choice([-1, 1, 5]))
            case 1:
                found = tree.match(Namespace(), text)
                held.append(found.pages)
                if found.tail_page >= 0:
                    tree.pool.release(tokens(found.tail_page))
            case 2:
                if held:
                    tree.pool.release(held.pop(random.randrange(len(held))))
            case 3:
                orders = {
                    node.page: (
                        max(node.pinned_until, now) if node.pinned_until > now else 0,
                        node.retention,
                        node.used,
                    )
                    for node in tree._walk()
                    if node.parent and not node.children and not tree.pool.holders[node.page]
                }
                assert tree.evict(1) == bool(orders)
                gone = orders.keys() - tree.pages().keys()
                assert len(gone) == bool(orders)
                assert [orders[page] for page in gone] == ([min(orders.values())] if orders else [])
        tree.pool.check()
        tree.check()
    for last in held:
        tree.pool.release(last)
    tree.clear()
    assert tree.pool.free == pages


@given(seed=st.integers(0, 2**32), pages=st.integers(1, 20), width=st.integers(1, 3))
@FIXED
def test_random_texts(seed: int, pages: int, width: int) -> None:
    """The tree never says it knows more than was put in, its books always balance, and held pages are never given
    away."""
    random = Random(seed)
    tree = RadixTree(PagePool(pages))
    put_in: list[np.ndarray] = []
    held: list[np.ndarray] = []
    for _ in range(60):
        text = tokens(*(random.randrange(width) for _ in range(random.randrange(0, 16 * pages))))
        match random.randrange(4):
            case 0:
                if -(-len(text) // PAGE) <= tree.pool.free + tree.pool.cached:
                    put(tree, text)
                    put_in.append(text)
            case 1:
                found = tree.match(Namespace(), text)
                known = max((common(text, t) for t in put_in), default=0)
                assert found.tokens <= known
                held.append(found.pages)
                if found.tail_page >= 0:
                    tree.pool.release(tokens(found.tail_page))
            case 2:
                if held:
                    tree.pool.release(held.pop(random.randrange(len(held))))
            case 3:
                wanted, before = random.randrange(4), tree.pool.cached
                assert tree.evict(wanted) == min(wanted, before)
        tree.pool.check()
        tree.check()
        assert all(np.all(tree.pool.holders[pages] > 0) for pages in held)
    for last in held:
        tree.pool.release(last)
    tree.clear()
    assert tree.pool.free == pages


def common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
