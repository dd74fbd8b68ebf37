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


def put(tree: RadixTree, text: np.ndarray, namespace: Namespace = Namespace()) -> np.ndarray:
    """Inserts a text as if it had just been computed on fresh pages, and lets go of them."""
    count = -(-len(text) // PAGE)
    if tree.pool.free < count:
        tree.evict(count - tree.pool.free)
    pages = tree.pool.alloc(count)
    kept = tree.insert(namespace, text, pages)
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
